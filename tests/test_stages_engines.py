"""Stages on external engines: the writer on vLLM, the frozen painter on vLLM-Omni."""

from __future__ import annotations

from pathlib import Path

import pytest
from external_engines.environments import make
from external_engines.texts import ROUNDING
from unirl.core.loop.build import build_parts
from unirl.core.plugins.catalog import Catalog
from unirl.core.roles import WeightReceipt, WeightUpdate
from unirl.core.types.weights import checksum
from unirl.engine_host.external import ExternalEngine
from writer_and_painter import RECIPE, composed, numbers, saved_weights

pytestmark = [pytest.mark.keyed, pytest.mark.slow]

SETTINGS = (
    "run.max_steps=2",
    "run.save_every=1",
    # Weights of another version are then off by far more than rounding.
    "backend.writer.lr=1e-2",
    # No two images share it, so that every step trains.
    "+reward@reward.light=brightness",
    "reward.light.weight=0.1",
)
ENGINES = (
    "engine@engine.rewrite=vllm",
    "engine.rewrite.kv_cache_mb=64",
    "engine.rewrite.max_num_seqs=16",
    "engine@engine.image=vllm-omni",
)


def test_every_stage_samples_from_the_weights_of_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("vllm")
    make("vllm-omni")
    receipts: list[tuple[str, WeightReceipt]] = []
    load = ExternalEngine.load_weights

    def noted(engine: ExternalEngine, update: WeightUpdate) -> WeightReceipt:
        receipt = load(engine, update)
        receipts.append((type(engine).__name__, receipt))
        return receipt

    monkeypatch.setattr(ExternalEngine, "load_weights", noted)
    recipe, folder = tmp_path / "writer.yaml", tmp_path / "run"
    recipe.write_text(RECIPE, encoding="utf-8")
    steps = numbers(composed(recipe, *SETTINGS, *ENGINES, f"run.dir={folder}"))

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
