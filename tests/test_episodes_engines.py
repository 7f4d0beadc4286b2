"""Episodes on the engines of vLLM and SGLang: the quickstart that talks with a calculator, as it runs in process."""

from __future__ import annotations

from pathlib import Path

import pytest
from external_engines.environments import make
from small_runs import run, steps
from unirl.loop.saved_samples import read_samples

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1200)]

WORDS = (
    *("data.prompts_per_step=24", "data.samples_per_prompt=8", "data.eval=''", "~tracker.report"),
    *("run.threads=1", "run.max_steps=2", "run.save_every=1", "run.media_every=1"),
)
SMALL = (
    *("engine.kv_cache_mb=64", "engine.max_num_seqs=16", "engine.max_model_len=128"),
    # Rounding of another batch then flips no token.
    "engine.dtype=float32",
)


@pytest.mark.parametrize("engine", ["vllm", "sglang-llm"])
def test_episodes_train_on_an_external_engine_as_in_process(engine: str, tmp_path: Path) -> None:
    make(engine)
    result = run(tmp_path / "run", f"engine={engine}", *SMALL, recipe="quickstart-tools", small=WORDS)
    assert (result.status, result.step) == ("done", 2)
    for step, metrics in steps(result.folder).items():
        # The second step also samples with weights that were synced. fp32 rounding of another attention, five tokens
        # to a text: the same bound as for texts without an environment.
        assert metrics["logp_mismatch_max"] < 1e-4, step
        assert metrics["grad_norm"] > 0 and metrics["updates_skipped"] == 0, step
        # Some episodes call the calculator, and go on behind its answer.
        assert 1 < metrics["reward/environment/turns"] <= 3, step
    tracks = [read_samples(result.folder, step)["text"].track for step in (0, 1)]
    for track in tracks:
        segment = track.text
        assert segment.mask is not None and segment.log_probs is not None
        # Tokens of the calculator are in some samples and not in all, and have no log-prob.
        rows = list(zip(segment.mask, segment.log_probs, strict=True))
        assert 0 < sum(not bool(mask.all()) for mask, _ in rows) < len(rows)
        assert all(not log_probs[: len(mask)][~mask].any() for mask, log_probs in rows)
