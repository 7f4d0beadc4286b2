"""Two steps of the recipe on the miniature checkpoint, with a reward that reads videos."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.loop.run import train

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
    "train.micro_batch_size=2",
    "eval=null",
]
FP32 = ["model.dtype=float32", "model.text_dtype=float32", "backend.mixed_precision=none"]


@pytest.mark.parametrize(("fps", "frame_ms"), [([], 62), (["sampling.fps=8"], 125)], ids=["default", "asked"])
def test_samples_are_shown_as_strips_and_animations_at_their_rate(
    fps: list[str], frame_ms: int, tiny_folder: Path, tmp_path: Path
) -> None:
    """16 frames per second by default: 62.5 ms each, of which files hold whole ones."""
    (prompts := tmp_path / "prompts.txt").write_text("a red ring rolls\na blue disc\n")
    paths = [f"data.train={prompts}", f"model.path={tiny_folder}", f"run.dir={tmp_path / 'run'}"]
    words = [*SMALL, *FP32, *paths, *fps, "run.max_steps=1", "run.media_every=1", "+tracker@tracker.report=report"]
    catalog = Catalog.discover()
    result = train(compose("wan21/flow-grpo", words, catalog=catalog), catalog=catalog, overrides=words)
    folder = result.folder / "media"
    strips, animations = sorted(folder.rglob("*.png")), sorted(folder.rglob("*.webp"))
    assert [file.stem for file in strips] == [file.stem for file in animations] != []
    with Image.open(strips[0]) as strip, Image.open(animations[0]) as animation:
        assert strip.size == (5 * 48, 32)
        assert (animation.n_frames, animation.size) == (5, (48, 32))
        animation.load()
        assert animation.info["duration"] == frame_ms


@pytest.mark.parametrize(
    "overrides",
    [[], FP32, [*FP32, "backend.trains=full", "backend.reference_copy=true"]],
    ids=["lora-bf16", "lora", "full"],
)
def test_the_recipe_trains_on_videos_from_ratio_one(overrides: list[str], tiny_folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red ring rolls\na blue disc\ntwo green squares\n")
    catalog = Catalog.discover()
    words = [
        *SMALL,
        *overrides,
        f"data.train={prompts}",
        f"model.path={tiny_folder}",
        f"run.dir={tmp_path / 'run'}",
    ]
    result = train(compose("wan21/flow-grpo", words, catalog=catalog), catalog=catalog, overrides=words)
    events = [json.loads(line) for line in (result.folder / "events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["kind"] == "step"]
    assert len(steps) == 2
    for step in steps:
        assert step["metrics"]["ratio_max_dev_first"] == 0.0
        assert step["metrics"]["grad_norm"] > 0
