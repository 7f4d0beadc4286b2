"""Two steps of the recipe on the miniature checkpoints, with a reward that reads videos."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.loop.run import train
from unirl.models.hunyuan_video15 import tiny

SMALL = [
    "run.max_steps=2",
    "run.threads=1",
    "data.prompts_per_step=2",
    "data.samples_per_prompt=2",
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
FP32 = ["model.dtype=float32", "model.text_dtype=float32", "model.vae_dtype=float32", "backend.mixed_precision=none"]
MIXED = [*FP32[:-1], "backend.mixed_precision=bf16"]


@pytest.mark.parametrize(
    ("task", "overrides"),
    [
        # Latents of 48 elements: their log-prob averages fewer roundings to 16 bits than that of a video.
        ("t2v", ["train.logp_mismatch_max=0.01"]),
        ("t2v", [*FP32, "backend.trains=full", "backend.reference_copy=true"]),
        ("i2v", ["model=hunyuan-video15-i2v", *FP32, "sampling.guidance_scale=6"]),
        ("t2v", [*MIXED, "backend.trains=full", "train.logp_mismatch_max=0.01"]),
    ],
    ids=["lora-bf16", "full", "first-frames-guided", "full-mixed-precision"],
)
def test_the_recipe_trains_on_videos_from_ratio_one(
    task: str, overrides: list[str], tiny_folder: Path, image_folder: Path, tmp_path: Path
) -> None:
    folder = tiny_folder if task == "t2v" else image_folder
    rows = [{"prompt": text} for text in ('a sign "GO"', "a blue disc", "two green squares")]
    if task == "i2v":
        for number, row in enumerate(rows):
            (ref,) = tiny.media(tmp_path, number=number)
            row["media"] = [{"modality": ref.modality, "role": ref.role, "uri": ref.uri}]
    (prompts := tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    catalog = Catalog.discover()
    words = [*SMALL, *overrides, f"data.train={prompts}", f"model.path={folder}", f"run.dir={tmp_path / 'run'}"]
    result = train(compose("hunyuan-video15/dance-grpo", words, catalog=catalog), catalog=catalog, overrides=words)
    events = [json.loads(line) for line in (result.folder / "events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["kind"] == "step"]
    assert len(steps) == 2
    for step in steps:
        assert step["metrics"]["ratio_max_dev_first"] == 0.0
        assert step["metrics"]["grad_norm"] > 0
