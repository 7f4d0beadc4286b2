"""Stages on external engines: the writer on vLLM, the frozen painter on vLLM-Omni."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from external_engines.environments import make
from external_engines.texts import ROUNDING
from unirl.core.errors import RunFailed
from unirl.core.plugins.catalog import Catalog
from unirl.core.roles import WeightReceipt, WeightUpdate
from unirl.core.types.request import Request
from unirl.core.types.track import Track
from unirl.core.types.weights import checksum
from unirl.engine_host.external import ExternalEngine
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.loop.build import build_parts
from unirl.loop.checkpoints import Checkpoints
from writer_and_painter import RECIPE, composed, numbers, saved_weights

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

SETTINGS = (
    "run.max_steps=2",
    "run.save_every=1",
    # Weights of another version are then off by far more than rounding.
    "backend.writer.lr=1e-2",
    # No two images share it, so that every step trains.
    "+reward@reward.light=brightness",
    "reward.light.weight=0.1",
)
WRITER = ("engine@engine.rewrite=vllm", "engine.rewrite.kv_cache_mb=64", "engine.rewrite.max_num_seqs=16")
PAINTER = ("engine@engine.image=vllm-omni",)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "writer.yaml"
    file.write_text(RECIPE, encoding="utf-8")
    return file


def test_every_stage_samples_from_the_weights_of_its_model(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("vllm")
    make("vllm-omni")
    receipts: list[tuple[str, WeightReceipt]] = []
    load = ExternalEngine.load_weights

    def noted(engine: ExternalEngine, update: WeightUpdate) -> WeightReceipt:
        receipt = load(engine, update)
        receipts.append((type(engine).__name__, receipt))
        return receipt

    monkeypatch.setattr(ExternalEngine, "load_weights", noted)
    folder = tmp_path / "run"
    steps = numbers(composed(recipe, *SETTINGS, *WRITER, *PAINTER, f"run.dir={folder}"))

    plan = composed(recipe, *SETTINGS)
    models = build_parts(plan, catalog=Catalog.discover()).models
    start = {name: checksum(dict(model.trainable.named_parameters())) for name, model in models.items()}
    first = checksum(saved_weights(plan, folder, step=1)["writer"])
    # The engine compares what it holds with the update, bit for bit, before it answers.
    assert [(engine, receipt.version, receipt.checksum) for engine, receipt in receipts] == [
        ("ExternalLatentEngine", 0, start["painter"]),
        ("ExternalTextEngine", 0, start["writer"]),
        ("ExternalTextEngine", 1, first),
    ]
    for step in (1, 2):
        assert steps[step]["rewrite/updates"] == 1
        assert steps[step]["rewrite/logp_mismatch_max"] < ROUNDING
        # Mean credit; both sides are means of the same fp32 numbers of order 1.
        assert steps[step]["rewrite/reward_mean"] == pytest.approx(steps[step]["image/reward_mean"], abs=1e-6)


def test_an_engine_killed_in_the_second_stage_ends_the_run_which_resumes_as_if_nothing_happened(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with a whole run whose painter is in process, and makes the same images."""
    make("vllm-omni")
    expected = numbers(composed(recipe, *SETTINGS, f"run.dir={tmp_path / 'whole'}"))
    plan = composed(recipe, *SETTINGS, *PAINTER, f"run.dir={tmp_path / 'run'}")
    generate = ExternalLatentEngine.generate

    def struck(engine: ExternalLatentEngine, request: Request) -> Track:
        if request.rollout == 1:
            os.kill(engine._process.pid, signal.SIGKILL)
        return generate(engine, request)

    with monkeypatch.context() as patched:
        patched.setattr(ExternalLatentEngine, "generate", struck)
        with pytest.raises(RunFailed, match=r"engine 'vllm-omni'.*(died|ended|is not running)"):
            numbers(plan)
    assert Checkpoints(tmp_path / "run" / "checkpoints").load().step == 1
    resumed = numbers(plan, resume=tmp_path / "run")
    # The engine forms its batches as requests arrive, and a forward of another batch rounds differently in fp32; the
    # advantages divide by standard deviations of 0.01 and more.
    assert list(resumed) == [2] and resumed[2] == pytest.approx(expected[2], rel=1e-3, abs=1e-5)
    kinds = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in kinds if event["kind"] == "step"] == [1, 2]
