"""Two steps of the recipe on the miniature checkpoint, with a reward that reads videos."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.loop.run import train

SMALL = [
    "run.max_steps=2",
    "run.threads=1",
    "data.prompts_per_step=2",
    "data.samples_per_prompt=2",
    "advantage.keep_best=0",
    "advantage.keep_worst=0",
    "sampling.num_inference_steps=4",
    "sampling.height=32",
    "sampling.width=48",
    "sampling.frames=5",
    "sampling.max_sequence_length=16",
    "sampling.sde.last=0.75",
    "train.updates_per_step=1",
    "train.micro_batch_size=2",
    "eval=null",
]
# Latents of 192 elements: their log-prob averages fewer roundings to 16 bits than that of a video.
MIXED = ["train.logp_mismatch_max=0.01"]
FP32 = ["model.text_dtype=float32", "model.vae_dtype=float32", "backend.mixed_precision=none"]


@pytest.mark.parametrize(
    "overrides",
    [MIXED, FP32, [*FP32, "backend.trains=lora", "+sampling.options.embedded_guidance=4"]],
    ids=["full-bf16", "full", "lora"],
)
def test_the_recipe_trains_on_videos_from_ratio_one(overrides: list[str], tiny_folder: Path, tmp_path: Path) -> None:
    (prompts := tmp_path / "prompts.txt").write_text("a red ring rolls\na blue disc\ntwo green squares\n")
    catalog = Catalog.discover()
    words = [*SMALL, *overrides, f"data.train={prompts}", f"model.path={tiny_folder}", f"run.dir={tmp_path / 'run'}"]
    result = train(compose("hunyuan-video/dance-grpo", words, catalog=catalog), catalog=catalog, overrides=words)
    events = [json.loads(line) for line in (result.folder / "events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["kind"] == "step"]
    assert len(steps) == 2
    for step in steps:
        assert step["metrics"]["ratio_max_dev_first"] == 0.0
        assert step["metrics"]["grad_norm"] > 0
