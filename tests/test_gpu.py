"""The quickstart on a CUDA device: the same loop, another device and other precisions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.loop.run import train

pytestmark = pytest.mark.gpu

SMALL = [
    "data.prompts_per_step=4",
    "data.samples_per_prompt=4",
    "eval.num_prompts=2",
    "run.device=cuda",
    "~tracker.report",
]


@pytest.mark.parametrize(
    ("overrides", "gap"),
    [
        # fp32 rounding of log-probs of order 1, with other kernels chosen for other batch shapes.
        ([], 1e-5),
        # bf16 keeps 8 bits of the velocity; the log-prob averages its error over 256 elements.
        (["backend.mixed_precision=bf16", "train.logp_mismatch_max=0.1"], 0.1),
    ],
    ids=["fp32", "bf16"],
)
def test_the_quickstart_runs_on_the_device_with_ratio_one(overrides: list[str], gap: float, tmp_path: Path) -> None:
    catalog = Catalog.discover()
    plan = compose(
        "quickstart", [*SMALL, "run.max_steps=2", f"run.dir={tmp_path / 'run'}", *overrides], catalog=catalog
    )
    result = train(plan, catalog=catalog)
    lines = (result.folder / "events.jsonl").read_text().splitlines()
    steps = [event["metrics"] for event in map(json.loads, lines) if event["kind"] == "step"]
    assert len(steps) == 2
    for metrics in steps:
        assert metrics["ratio_max_dev_first"] == 0.0
        assert metrics["logp_mismatch_max"] < gap
