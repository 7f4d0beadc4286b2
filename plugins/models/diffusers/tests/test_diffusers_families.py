# diffusers exports its classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false
"""The model against runs of diffusers' own pipelines, loaded from the same folder: nothing of the model is used there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image
from pipeline_inputs import PROMPT, STEPS, inputs_of, sampling_of, sources
from tiny_pipelines.families import FAMILIES, REFUSED, class_name
from torch import Tensor
from unirl.core.errors import RecipeError
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.models.diffusers.config import DiffusersConfig
from unirl.models.diffusers.layers import lora_targets, wrap_blocks
from unirl.models.diffusers.model import DiffusersModel, build
from unirl.numerics.diffusion.guidance import guided_velocity, make_guidance

WARNINGS = [
    # diffusers' and numpy's, of the pipelines themselves.
    pytest.mark.filterwarnings("ignore:In CPU autocast"),
    pytest.mark.filterwarnings("ignore:__array__ implementation"),
    pytest.mark.filterwarnings("ignore:`LoraLoaderMixin` is deprecated"),
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated"),
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
]
pytestmark = [pytest.mark.slow, pytest.mark.nightly, *WARNINGS]
Load = Callable[..., DiffusersModel]
SAME = 1e-5
"""Fraction of the largest element. The same fp32 operations, in batches of other sizes, which sum in another order: 1e-7
in each of a few layers. A wrong step of sigma, sign or order gives an error of about 1."""


@dataclass
class OwnRun:
    sigmas: Tensor
    samples: list[Tensor]
    """The states that the scheduler was given, and the one that it gave last."""
    predictions: list[Tensor]
    media: Tensor


def own_run(
    folder: Path, name: str, sampling: LatentSamplingConfig, images: list[Image.Image] | None = None, **arguments: Any
) -> OwnRun:
    """The pipeline with its own scheduler, whose `step` is watched."""
    pipeline: Any = getattr(diffusers, class_name(name)).from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    )
    pipeline.set_progress_bar_config(disable=True)
    samples: list[Tensor] = []
    predictions: list[Tensor] = []
    step = pipeline.scheduler.step

    def watched(model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
        samples.append(sample.clone())
        predictions.append(model_output.clone())
        result = step(model_output, timestep, sample, *args, **kwargs)
        last[:] = [result[0].clone()]
        return result

    last: list[Tensor] = []
    pipeline.scheduler.step = watched
    if FAMILIES[name].frames > 1:
        arguments |= {"num_frames": sampling.frames, "frames": sampling.frames}
    if images:
        arguments["image"] = images[0] if len(images) == 1 else images
    optional = {
        "max_area": sampling.height * sampling.width,
        "use_resolution_binning": False,
        "max_sequence_length": sampling.max_sequence_length,
    }
    known = signature(pipeline.__call__).parameters
    arguments = {k: v for k, v in {**optional, **arguments}.items() if k in known}
    result = pipeline(
        prompt=[PROMPT] if FAMILIES[name].takes_lists else PROMPT,
        height=sampling.height,
        width=sampling.width,
        num_inference_steps=STEPS,
        # The model's: some pipelines draw what an image is encoded to.
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
        return_dict=False,
        **{**FAMILIES[name].call, **arguments},
    )
    return OwnRun(pipeline.scheduler.sigmas, [*samples, *last], predictions, result[0])


def unguided(name: str) -> dict[str, Any]:
    family = FAMILIES[name]
    off = family.guided(1.0) if family.guided else {}
    return {**({"guidance_scale": 1.0} if name.startswith("Lumina") else {}), **off}


def latents(model: DiffusersModel, states: list[Tensor], sampling: LatentSamplingConfig) -> Tensor:
    """[T, *latent_shape] fp32 of states, tokens of which are places row by row."""
    shape = model.latent_shape(sampling)
    if states[0].shape[1:] == (*shape[1:], shape[0]):
        return torch.cat(states).movedim(-1, 1).float()
    return torch.cat([s if s.ndim > 3 else s.transpose(1, 2).reshape(1, *shape) for s in states]).float()


def gap(result: Tensor, expected: Tensor) -> float:
    assert result.shape == expected.shape
    return float((result - expected).abs().nan_to_num(nan=torch.inf).max() / expected.abs().max())


def rows(conditions: dict[str, Any], index: list[int]) -> dict[str, Any]:
    return {name: [value[row] for row in index] for name, value in conditions.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_pipeline_gives_the_numbers_of_its_own_run(name: str, load: Load, folder: Callable[[str], Path]) -> None:
    model, sampling, family = load(name), sampling_of(name), FAMILIES[name]
    own = own_run(folder(name), name, sampling, sources(name), **unguided(name))
    sigmas = 1 - own.sigmas if family.sign < 0 else own.sigmas
    # Twice the spacing of fp32 numbers below 1: of sigma, and of 1 - sigma.
    assert torch.allclose(model.schedule(sampling), sigmas.float(), rtol=0, atol=1.2e-7)
    x = latents(model, own.samples, sampling)
    assert x.shape[1:] == model.latent_shape(sampling)
    conditions = rows(dict(model.encode(inputs_of(name, PROMPT), sampling=sampling)), [0] * STEPS)
    with torch.no_grad():
        # All steps at once: every row has its own sigma.
        velocity = model.velocity(x[:-1], sigmas[:-1].float(), conditions)
        media = model.decode(x[-1:])
    assert gap(velocity, family.sign * latents(model, own.predictions, sampling)) <= SAME
    expected = own.media.float()
    if expected.shape[1] == 4:
        # Seen on white.
        expected = expected[:, :3] * expected[:, 3:] + (1 - expected[:, 3:])
    assert gap(media, expected) <= SAME
    assert own.media.std() > 1e-3
    layout = model.facts.layouts[bool(family.images)]
    assert (layout.takes_row_sigmas, bool(layout.ragged), layout.is_single) == (
        family.takes_row_sigmas,
        family.is_ragged,
        family.is_single,
    )
    assert (set(model.facts.layouts), model.facts.most_images) == (family.modes, family.most_images)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.guided])
def test_our_guidance_is_that_of_the_pipeline(name: str, load: Load, folder: Callable[[str], Path]) -> None:
    model, sampling, family = load(name), sampling_of(name), FAMILIES[name]
    assert family.guided
    own = own_run(folder(name), name, sampling, sources(name), **(family.negative or {}), **family.guided(3.0))
    sigmas = 1 - own.sigmas if family.sign < 0 else own.sigmas
    branches = {
        branch: rows(dict(model.encode(inputs_of(name, text), sampling=sampling)), [0] * STEPS)
        for branch, text in (("positive", PROMPT), ("negative", "blurred" if family.negative else ""))
    }
    with torch.no_grad():
        velocity = guided_velocity(
            model.velocity,
            latents(model, own.samples[:-1], sampling),
            sigmas[:-1].float(),
            conditions=branches,
            guidance=make_guidance(family.guidance, scale=3.0),
        )
    # Guidance of 3 multiplies rounding by 3 + 2.
    assert gap(velocity, family.sign * latents(model, own.predictions, sampling)) <= 5 * SAME


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_a_batch_are_those_of_each_alone_and_have_gradients(name: str, load: Load) -> None:
    model, sampling = load(name), sampling_of(name)
    conditions = dict(model.encode(inputs_of(name, PROMPT, "two blue squares, and a disc"), sampling=sampling))
    x = torch.randn((4, *model.latent_shape(sampling)), generator=torch.Generator().manual_seed(2))
    index, sigma = [0, 1, 1, 0], torch.tensor([0.9, 0.6, 0.35, 0.6])
    model.trainable.zero_grad()
    together = model.velocity(x, sigma, rows(conditions, index))
    assert together.dtype is torch.float32
    with torch.no_grad():
        alone = [model.velocity(x[n : n + 1], sigma[n : n + 1], rows(conditions, [index[n]])) for n in range(4)]
    assert gap(together.detach(), torch.cat(alone)) <= SAME
    together.square().sum().backward()
    targets = lora_targets(model.trainable)
    layers = [n for n, _ in model.trainable.named_modules() if any(n == t or n.endswith(f".{t}") for t in targets)]
    grads = {layer: model.trainable.get_submodule(layer).get_parameter("weight").grad for layer in layers}
    reached = [layer for layer, grad in grads.items() if grad is not None and bool((grad != 0).any())]
    assert layers
    assert len(layers) - len(reached) == FAMILIES[name].idle
    assert all(torch.isfinite(p.grad).all() for p in model.trainable.parameters() if p.grad is not None)
    blocks = [part for part in model.trainable.modules() if type(part).__name__ in wrap_blocks(model.trainable)]
    assert sum(len(set(block.modules()) & {model.trainable.get_submodule(n) for n in layers}) for block in blocks)
    model.trainable.zero_grad()


@pytest.mark.parametrize("name", FAMILIES)
def test_in_bfloat16_a_velocity_is_that_of_float32_but_for_rounding(name: str, load: Load) -> None:
    """Size other than in the other tests. The loaded model has been compared with its pipeline's bf16 run already."""
    sampling = dataclasses.replace(sampling_of(name), height=128, width=64)
    models = [load(name), load(name, dtype="bfloat16")]
    assert {p.dtype for p in models[1].trainable.parameters()} & {torch.bfloat16}
    x = torch.randn((1, *models[0].latent_shape(sampling)), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        velocities = [
            model.velocity(x, torch.tensor([0.6]), model.encode(inputs_of(name, PROMPT), sampling=sampling))
            for model in models
        ]
    # Weights and activations of 8 bits, 0.4% each, in some twenty products one after another; RMS, for extremes add up.
    expected = velocities[0]
    assert float((velocities[1] - expected).square().mean().sqrt() / expected.square().mean().sqrt()) <= 0.1


@pytest.mark.parametrize("name", REFUSED)
def test_a_pipeline_that_is_off_is_refused_with_the_reason(name: str, folder: Callable[[str], Path]) -> None:
    with pytest.raises(RecipeError) as caught:
        build(DiffusersConfig(path=str(folder(name))), device="cpu")
    assert str(caught.value).startswith(f"model.path: {class_name(name)} ")
    assert REFUSED[name][1] in str(caught.value)
