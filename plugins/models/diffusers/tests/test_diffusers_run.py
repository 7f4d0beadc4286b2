"""Two steps of the recipe on several pipelines: in process, wrapped by FSDP2, with bf16 and recomputation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import ray_clusters
from pipeline_inputs import FP32, SMALL, sources, words_of
from tiny_pipelines.families import FAMILIES, TWO_RANKS
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.loop.run import train

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

TEXTS = ("a red ring", "two blue squares on the left", "a disc")
SHORT = ["sampling.num_inference_steps=3", "sampling.sde.count=2"]


def trained(folder: Path, path: Path, words: list[str], *, name: str = "") -> list[dict[str, float]]:
    """Metrics of the steps. name: of a family, whose prompts have their own source images."""
    lines: list[str] = []
    for number, text in enumerate(TEXTS):
        media: list[dict[str, str]] = []
        for place, image in enumerate(sources(name, number) if name else []):
            image.save(path / f"{number}-{place}.png")
            media.append({"modality": "image", "role": "source", "uri": f"{number}-{place}.png"})
        lines.append(json.dumps({"prompt": text, **({"media": media} if media else {})}))
    (prompts := path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    catalog = Catalog.discover()
    paths = [f"data.train={prompts}", f"model.path={folder}", f"run.dir={path / 'run'}"]
    words = [*SMALL, *words, *paths]
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
    steps = trained(tiny_folder, tmp_path, [*SHORT, *words])
    assert len(steps) == 2
    for step in steps:
        # All steps stacked are a batch of another size, which sums in another order; a tenth of the clip range.
        assert step["ratio_max_dev_first"] <= (1e-5 if "train.replay=stacked" in words else 0.0)
        assert step["grad_norm"] > 0


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.filterwarnings("ignore:__array__ implementation")
@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated")
@pytest.mark.filterwarnings("ignore:`LoraLoaderMixin` is deprecated")
@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_every_pipeline_trains_by_lora_from_ratio_one(name: str, folder: Callable[[str], Path], tmp_path: Path) -> None:
    """The recipe, whose blocks are recomputed in the backward pass."""
    for step in trained(folder(name), tmp_path, [*SHORT, *FP32, *words_of(name)], name=name):
        assert step["ratio_max_dev_first"] == 0.0
        assert step["grad_norm"] > 0


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks_have_the_gradient_of_one_process(name: str, folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Sharded by FSDP2 over gloo, recomputed, guided, LoRA."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    words = [*FP32, *words_of(name), "sampling.guidance_scale=2.0", "sampling.negative_prompt=blurred"]
    words += ["train.micro_batch_size=1", "sampling.num_inference_steps=2", "sampling.sde.count=1"]
    if "~reward.jpeg" not in words:
        # The size of a JPEG is a whole number of bytes: one more moves the gradient further than rounding does.
        words += ["~reward.jpeg", "+reward@reward.light=brightness"]
    one = trained(folder(name), tmp_path / "one", words)
    ray = ["launcher=ray", "launcher.train_ranks=2", "launcher.cpus=0.1", "launcher.reward_cpus=0.1"]
    with ray_clusters.joined():
        two = trained(folder(name), tmp_path / "two", [*words, *ray])
    for ours, expected in zip(two, one, strict=True):
        assert ours["ratio_max_dev_first"] == 0.0
        # A sum over two ranks in another order, 1e-7 of each of some hundred terms, and after a step of the optimizer.
        assert ours["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
