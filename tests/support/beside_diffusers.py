"""Models beside the pipelines of diffusers: the same noise, the shared sampler without any, and the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from unirl.core.roles.model import DiffusionModel
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.numerics.diffusion.denoise import denoise
from unirl.numerics.diffusion.guidance import make_guidance
from unirl.numerics.diffusion.kernels import make_kernel

__all__ = ["assert_weights_are_those_of", "final_latents", "initial_latents"]


def initial_latents(model: DiffusionModel, sampling: LatentSamplingConfig, rows: int) -> Tensor:
    """[rows, *latent_shape] of noise, the same in every call."""
    shape = (rows, *model.latent_shape(sampling))
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def final_latents(
    model: DiffusionModel, x: Tensor, sampling: LatentSamplingConfig, branches: Mapping[str, Inputs]
) -> Tensor:
    """Latents of the shared sampler from `x`, without noise.  branches: of the guidance, `positive` and `negative`."""
    with torch.no_grad():
        return denoise(
            model.velocity,
            x,
            sigmas=model.schedule(sampling),
            kernel=make_kernel("euler", eta=0.0),
            sde_steps=torch.zeros((len(x), 0), dtype=torch.int64),
            conditions={name: model.encode(inputs, sampling=sampling) for name, inputs in branches.items()},
            guidance=make_guidance(sampling.guidance_mode, scale=sampling.guidance_scale, **sampling.guidance_options),
        ).x


def assert_weights_are_those_of(pipeline_class: Any, folder: Path, components: Mapping[str, Any]) -> None:
    """Assert that every component has the class and weights that diffusers loads from the checkpoint."""
    expected = pipeline_class.from_pretrained(folder, dtype=torch.float32).components
    assert expected.keys() == components.keys()
    for name, part in components.items():
        assert type(part) is type(expected[name])
        if isinstance(part, torch.nn.Module):
            state = part.state_dict()
            assert state.keys() == expected[name].state_dict().keys()
            assert all(torch.equal(weight, state[key]) for key, weight in expected[name].state_dict().items())
