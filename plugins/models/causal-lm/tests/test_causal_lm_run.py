"""A run with the generic model is that of the model plugin of its architecture."""

from __future__ import annotations

import json
from pathlib import Path

from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.loop.run import train

WORDS = (
    "data.prompts_per_step=4", "data.samples_per_prompt=4", "data.eval=''", "sampling.max_new_tokens=12",
    "run.max_steps=2", "run.keep=0", "run.threads=1", "~tracker.report",
)  # fmt: skip


def test_two_steps_are_those_of_qwen3_bit_for_bit(tmp_path: Path) -> None:
    catalog, results = Catalog.discover(), []
    for name in ("qwen3", "causal-lm"):
        plan = compose("quickstart-text", [*WORDS, f"model={name}", f"run.dir={tmp_path / name}"], catalog=catalog)
        folder = train(plan, catalog=catalog).folder
        events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
        results.append([event["metrics"] for event in events if event["kind"] == "step"])
    for left, right in zip(*results, strict=True):
        for key in ("loss", "reward_mean", "grad_norm", "logp_mismatch_max"):
            assert left[key] == right[key], key
        assert left["grad_norm"] > 0
