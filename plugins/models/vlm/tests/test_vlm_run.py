"""A run with the generic model is that of the model plugin of its architecture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.loop.run import train

WORDS = (
    "data.prompts_per_step=4", "data.samples_per_prompt=4", "data.eval=''", "run.max_steps=2", "run.keep=0",
    "run.threads=1", "~tracker.report",
)  # fmt: skip


def steps(folder: Path, *words: str) -> list[dict[str, float]]:
    catalog = Catalog.discover()
    plan = compose("quickstart-vl", [*WORDS, *words, f"run.dir={folder}"], catalog=catalog)
    events = map(json.loads, (train(plan, catalog=catalog).folder / "events.jsonl").read_text().splitlines())
    return [event["metrics"] for event in events if event["kind"] == "step"]


def test_two_steps_are_those_of_qwen3_vl_bit_for_bit(tmp_path: Path) -> None:
    results = [steps(tmp_path / name, f"model={name}") for name in ("qwen3-vl", "vlm")]
    for left, right in zip(*results, strict=True):
        for key in ("loss", "reward_mean", "grad_norm", "logp_mismatch_max"):
            assert left[key] == right[key], key
        assert left["grad_norm"] > 0


@pytest.mark.parametrize("trains", ["full", "lora"])
def test_a_run_that_trains_the_vision_tower_has_another_gradient(trains: str, tmp_path: Path) -> None:
    words = ("model=vlm", f"backend.trains={trains}")
    frozen = steps(tmp_path / "frozen", *words)
    trained = steps(tmp_path / "trained", *words, "model.train_vision=true")
    assert frozen[0]["reward_mean"] == trained[0]["reward_mean"]
    assert trained[0]["grad_norm"] > frozen[0]["grad_norm"]
