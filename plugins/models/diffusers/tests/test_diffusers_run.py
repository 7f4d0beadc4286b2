"""Two steps of the recipe on several pipelines: in process, wrapped by FSDP2, with bf16 and recomputation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from unirl.core.loop.run import train
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose

SMALL = [
    "run.max_steps=2",
    "run.threads=1",
    "data.prompts_per_step=2",
    "data.samples_per_prompt=2",
    "sampling.num_inference_steps=4",
    "sampling.height=64",
    "sampling.width=96",
    "sampling.sde.last=0.75",
    "train.micro_batch_size=2",
    "backend.lora.rank=4",
    "eval=null",
]
FP32 = ["model.dtype=float32", "model.text_dtype=float32", "backend.mixed_precision=none"]

VIDEO = ["sampling.fps=16", "~reward.jpeg", "+reward@reward.motion=function"]
VIDEO += ["reward.motion.target=unirl.rewards.rules.function:mean_motion"]


def trained(folder: Path, path: Path, words: list[str]) -> list[dict[str, float]]:
    """Metrics of the steps."""
    (prompts := path / "prompts.txt").write_text("a red ring\ntwo blue squares on the left\na disc\n")
    catalog = Catalog.discover()
    words = [*SMALL, *words, f"data.train={prompts}", f"model.path={folder}", f"run.dir={path / 'run'}"]
    result = train(compose("diffusers/flow-grpo", words, catalog=catalog), catalog=catalog, overrides=words)
    events = [json.loads(line) for line in (result.folder / "events.jsonl").read_text().splitlines()]
    return [event["metrics"] for event in events if event["kind"] == "step"]


@pytest.mark.parametrize(
    "words",
    [
        [],
        FP32,
        [*FP32, "train.replay=stacked", "backend.activation_checkpointing=false"],
        [*FP32, "backend.trains=full", "sampling.guidance_scale=2.0", "sampling.negative_prompt=blurred"],
    ],
    ids=["lora-bf16-recomputed", "lora-recomputed", "stacked", "full-guided"],
)
def test_the_recipe_trains_the_miniature_from_ratio_one(words: list[str], tiny_folder: Path, tmp_path: Path) -> None:
    steps = trained(tiny_folder, tmp_path, words)
    assert len(steps) == 2
    for step in steps:
        # All steps stacked are a batch of another size, which sums in another order; a tenth of the clip range.
        assert step["ratio_max_dev_first"] <= (1e-5 if "train.replay=stacked" in words else 0.0)
        assert step["grad_norm"] > 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("SanaPipeline", ["+model.call.complex_human_instruction=null"]),
        ("QwenImagePipeline", []),
        ("ZImagePipeline", []),
        ("Lumina2Pipeline", []),
        ("WanPipeline", [*VIDEO, "sampling.frames=5"]),
        ("LTXPipeline", [*VIDEO, "sampling.frames=9"]),
    ],
)
@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_the_recipe_trains_other_pipelines_from_ratio_one(
    name: str, words: list[str], folder: Callable[[str], Path], tmp_path: Path
) -> None:
    for step in trained(folder(name), tmp_path, [*FP32, *words]):
        assert step["ratio_max_dev_first"] == 0.0
        assert step["grad_norm"] > 0
