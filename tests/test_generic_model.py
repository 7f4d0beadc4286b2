"""`model=diffusers` against the models that are written for one pipeline: two readings of the same checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from unirl.core.plugins.catalog import Catalog
from unirl.core.specs.spec import ModelSpec
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.models.diffusers.config import DiffusersConfig
from unirl.models.diffusers.model import build

CATALOG = Catalog.discover()
SAMPLING = LatentSamplingConfig(num_inference_steps=4, height=64, width=96, max_sequence_length=64)
TEXTS = ("a red ring", "two blue squares on the left")


@pytest.mark.parametrize(
    ("name", "frames", "is_equal_schedule"),
    [
        # diffusers shifts the sigmas of Stable Diffusion 3 twice; its own model does once.
        ("sd3", 1, False),
        ("z-image", 1, True),
        ("flux2-klein", 1, True),
        ("qwen-image", 1, True),
        # Its own model has the uniform grid, shifted (`schedule.variant=exact`); its pipeline that of UniPC.
        ("wan21", 5, False),
    ],
)
@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_a_dedicated_model_and_the_generic_one_give_the_same_numbers(
    name: str, frames: int, is_equal_schedule: bool, tmp_path: Path
) -> None:
    """To 1e-5 of the largest element: the same fp32 operations, in batches of other sizes, 1e-7 in each of a few
    layers."""
    spec = CATALOG.get("model", name).spec
    assert isinstance(spec, ModelSpec) and spec.tiny is not None
    CATALOG.resolve(spec.tiny.write)(tmp_path / "tiny", seed=0)
    config = CATALOG.resolve(spec.config)(path=str(tmp_path / "tiny"))
    dedicated: Any = CATALOG.resolve(spec.build)(config, device="cpu")
    generic = build(DiffusersConfig(path=str(tmp_path / "tiny")), device="cpu")
    sampling = LatentSamplingConfig(**{**vars(SAMPLING), "frames": frames})
    x = torch.randn((2, *dedicated.latent_shape(sampling)), generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([0.9, 0.4])
    with torch.no_grad():
        velocities = [
            dedicated.velocity(x, sigma, dedicated.encode(Inputs.of_texts(TEXTS), sampling=sampling)),
            generic.velocity(x, sigma, generic.encode(Inputs.of_texts(TEXTS), sampling=sampling)),
        ]
        media = [dedicated.decode(x), generic.decode(x)]
    schedules = [dedicated.schedule(sampling), generic.schedule(sampling)]
    assert generic.latent_shape(sampling) == x.shape[1:]
    for results in (velocities, media):
        assert results[0].shape == results[1].shape
        assert float((results[0] - results[1]).abs().max() / results[0].abs().max()) <= 1e-5
    assert torch.allclose(*schedules, rtol=0, atol=1e-6) == is_equal_schedule
