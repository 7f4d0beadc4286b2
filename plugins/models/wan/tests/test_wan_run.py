"""Two steps of each recipe on the miniature checkpoint, with a reward that reads videos."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from external_engines import environments
from PIL import Image
from unirl.core.errors import DataError
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.loop.run import train
from wan_pipelines import frames_of

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

Tiny = Callable[[str], Path]
SMALL = [
    "run.max_steps=2",
    "run.threads=1",
    "data.prompts_per_step=2",
    "data.samples_per_prompt=2",
    "sampling.num_inference_steps=4",
    "sampling.height=32",
    "sampling.width=48",
    "sampling.frames=5",
    "sampling.sde.last=0.75",
    "train.micro_batch_size=2",
    "eval=null",
]
FP32 = ["model.dtype=float32", "model.text_dtype=float32", "backend.mixed_precision=none"]
FULL = ["backend.trains=full", "backend.reference_copy=true"]
STACKED = ["train.replay=stacked"]


def run(name: str, checkpoint: Path, folder: Path, words: Sequence[str], *, frames: bool) -> Path:
    """Train a model's recipe on three prompts, each with a first frame or with none; returns the folder of the run."""
    texts = ["a red ring rolls", "a blue disc", "two green squares"]
    rows: list[dict[str, Any]] = [{"prompt": text} for text in texts]
    media = frames_of(folder, range(3), texts, height=32, width=48).media if frames else ()
    for row, own in zip(rows, media, strict=frames):
        row["media"] = [{"modality": "image", "role": "source", "uri": Path(own[0].uri).name}]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    # Beside features of the first frame, the transformer of Wan 2.1 takes no other length.
    length = 512 if name == "wan21-i2v" else 16
    words = [
        *SMALL,
        f"sampling.max_sequence_length={length}",
        f"data.train={folder / 'prompts.jsonl'}",
        f"model.path={checkpoint}",
        f"run.dir={folder / 'run'}",
        *words,
    ]
    catalog = Catalog.discover()
    return train(compose(f"{name}/flow-grpo", words, catalog=catalog), catalog=catalog, overrides=words).folder


@pytest.mark.parametrize(("fps", "frame_ms"), [([], 62), (["sampling.fps=8"], 125)], ids=["default", "asked"])
def test_samples_are_shown_as_strips_and_animations_at_their_rate(
    fps: list[str], frame_ms: int, tiny: Tiny, tmp_path: Path
) -> None:
    """16 frames per second by default: 62.5 ms each, of which files hold whole ones."""
    words = [*FP32, *fps, "run.max_steps=1", "run.media_every=1", "+tracker@tracker.report=report"]
    folder = run("wan21", tiny("wan21"), tmp_path, words, frames=False) / "media"
    strips, animations = sorted(folder.rglob("*.png")), sorted(folder.rglob("*.webp"))
    assert [file.stem for file in strips] == [file.stem for file in animations] != []
    with Image.open(strips[0]) as strip, Image.open(animations[0]) as animation:
        assert strip.size == (5 * 48, 32)
        assert (animation.n_frames, animation.size) == (5, (48, 32))
        animation.load()
        assert animation.info["duration"] == frame_ms


CASES = {
    "wan21-lora-bf16": ("wan21", []),
    "wan21-lora": ("wan21", FP32),
    "wan21-full": ("wan21", [*FP32, *FULL]),
    "wan22-lora": ("wan22", FP32),
    "wan22-vllm-omni": ("wan22", [*FP32, "engine=vllm-omni"]),
    "wan22-sglang-low": ("wan22", [*FP32, "engine=sglang", "model.experts=low"]),
    "wan22-high": ("wan22", [*FP32, "model.experts=high"]),
    "wan22-stacked": ("wan22", [*FP32, *STACKED]),
    "wan22-full": ("wan22", [*FP32, *FULL]),
    "wan21-i2v-lora": ("wan21-i2v", [*FP32, "sampling.guidance_scale=4"]),
    "wan21-i2v-full": ("wan21-i2v", [*FP32, *FULL]),
    "wan21-i2v-stacked": ("wan21-i2v", [*FP32, *STACKED]),
    "wan22-i2v-lora": ("wan22-i2v", FP32),
    "wan22-i2v-high": ("wan22-i2v", [*FP32, "model.experts=high"]),
    "wan22-i2v-full": ("wan22-i2v", [*FP32, *FULL]),
}


@pytest.mark.parametrize(("name", "words"), CASES.values(), ids=CASES)
def test_the_recipe_trains_from_ratio_one(name: str, words: list[str], tiny: Tiny, tmp_path: Path) -> None:
    engine = next((word.removeprefix("engine=") for word in words if word.startswith("engine=")), "")
    if engine:
        environments.make(engine)
    folder = run(name, tiny(name), tmp_path, words, frames=name.endswith("-i2v"))
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    steps = [event["metrics"] for event in events if event["kind"] == "step"]
    assert len(steps) == 2
    for step in steps:
        # The forwards of an engine, or of stacked rows, are other ones: spacings of fp32 log-probs of order 1, times ten.
        is_exact = not engine and STACKED[0] not in words
        assert step["ratio_max_dev_first"] <= (0.0 if is_exact else 2e-6)
        assert step["grad_norm"] > 0
    # Two blocks of eight projections in each expert that trains.
    num_trained = 1 if name.startswith("wan21") or any("experts=" in word for word in words) else 2
    assert FULL[0] in words or f'"lora_layers": {16.0 * num_trained}' in json.dumps(events)


@pytest.mark.parametrize(
    ("name", "frames", "message"),
    [
        ("wan21-i2v", False, r"got no media of role 'source', of which model 'wan21-i2v' needs one"),
        ("wan21", True, r"got media of role 'source', expected none, which model 'wan21' takes"),
    ],
)
def test_prompts_without_a_frame_and_with_one_too_many_are_refused_before_anything_is_built(
    tiny: Tiny, tmp_path: Path, name: str, frames: bool, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        run(name, tiny(name), tmp_path, FP32, frames=frames)
