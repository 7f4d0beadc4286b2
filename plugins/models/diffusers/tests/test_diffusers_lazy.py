"""Models without values, in one process: what is found on shapes, and what waits for the values."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from held_memory import held_in_a_step
from pipeline_inputs import FP32, SMALL, inputs_of, sampling_of, words_of
from test_diffusers_families import WARNINGS
from tiny_pipelines.families import FAMILIES
from unirl.core.errors import RecipeError, RunFailed
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.models.diffusers.config import DiffusersConfig
from unirl.models.diffusers.model import DiffusersModel, build
from unirl.tools.plan.memory_plan import memory_plan
from unirl.train_host.sharding import allocate

pytestmark = [pytest.mark.slow, pytest.mark.nightly, *WARNINGS]
BY_MASKS = ("Lumina2Pipeline", "HunyuanVideo15Pipeline", "MochiPipeline")
"""Pipelines whose transformer reads lengths from its mask."""


def lazily(name: str, folder: Callable[[str], Path]) -> DiffusersModel:
    return build(DiffusersConfig(path=str(folder(name)), call=FAMILIES[name].call), device="cpu", lazy=True)


def filled(model: DiffusersModel) -> DiffusersModel:
    allocate(model.trainable, torch.device("cpu"))
    model.fill(model.trainable.state_dict(keep_vars=True))
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_found_on_shapes_is_what_is_found_with_values(
    name: str, load: Callable[[str], DiffusersModel], folder: Callable[[str], Path]
) -> None:
    model, expected = lazily(name, folder), load(name).facts
    assert all(param.is_meta for param in model.trainable.parameters())
    assert model.facts == dataclasses.replace(expected, is_verified=False)
    filled(model).verify()
    assert model.facts == expected


def test_a_filled_model_refuses_to_run_before_it_is_verified(folder: Callable[[str], Path]) -> None:
    name = "StableDiffusion3Pipeline"
    model, sampling = filled(lazily(name, folder)), sampling_of(name)
    conditions = model.encode(inputs_of(name, "a ring"), sampling=sampling)
    x = torch.zeros((1, *model.latent_shape(sampling)))
    with pytest.raises(RunFailed, match=r"not compared with its pipeline since\. Call `verify`"):
        model.velocity(x, torch.tensor([0.5]), conditions)


def test_a_cut_file_of_weights_is_refused_before_anything_runs(tiny_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_folder, tmp_path / "cut")
    file = tmp_path / "cut" / "transformer" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(RecipeError, match=r"^model\.path: .*diffusion_pytorch_model\.safetensors' cannot be read"):
        build(DiffusersConfig(path=str(tmp_path / "cut")), device="cpu", lazy=True)


def test_memory_is_planned_from_a_folder_without_weights(tiny_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_folder, tmp_path / "hollow", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "prompts.txt").write_text("a ring\n")
    catalog, data = Catalog.discover(), f"data.train={tmp_path / 'prompts.txt'}"
    words = ["sampling.height=64", "sampling.width=96", data]
    sizes = [
        memory_plan(
            compose("diffusers/flow-grpo", [*words, f"model.path={folder}"], catalog=catalog), catalog=catalog
        ).size
        for folder in (tmp_path / "hollow", tiny_folder)
    ]
    assert sizes[0] == sizes[1]
    # 64 x 96 pixels: 8 x 12 places of four channels, packed in 2 x 2.
    assert sizes[0].row_elements == 16 * 4 * 6


@pytest.mark.parametrize("again", ["false", "true"])
@pytest.mark.parametrize("name", BY_MASKS)
def test_a_step_of_a_transformer_that_reads_its_mask_holds_what_was_planned(
    name: str, again: str, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("a ring\na disc\n")
    catalog, data = Catalog.discover(), f"data.train={tmp_path / 'prompts.txt'}"
    words = [*SMALL, *words_of(name), *FP32, data, f"model.path={folder(name)}"]
    words.append(f"backend.activation_checkpointing={again}")
    plan = compose("diffusers/flow-grpo", words, catalog=catalog)
    (process,) = memory_plan(plan, catalog=catalog).processes
    held = held_in_a_step(plan, catalog=catalog)
    # Encoders and VAE are all loaded, and in fp32 here, so they are counted to the byte.
    assert process.items["encoders and decoder"] == held["encoders and decoder"] > 0
    for item in ("trained weights", "frozen weights", "activations", "trajectories", "conditions"):
        # What `unirl plan` promises. Most is lost with blocks that are computed again, 8 % here: the plan adds the largest
        # one to all that is kept outside, of which the layers after the last block are done when the first is computed.
        assert process.items[item] == pytest.approx(held[item], rel=0.15), item
