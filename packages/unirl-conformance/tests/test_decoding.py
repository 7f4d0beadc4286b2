"""Real models whose decoding is broken are caught, by the comparison with their pipelines' media and by no other claim
about numbers."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor
from unirl.conformance.run import run_suite
from unirl.conformance.subjects import Selection
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.spec import ModelSpec
from unirl.models.qwen_image.model import QwenImageModel
from unirl.models.qwen_image.plugin import SPEC as QWEN_IMAGE
from unirl.models.sd3.model import Sd3Model
from unirl.models.sd3.plugin import SPEC as SD3
from unirl.models.wan.model import Wan21Model
from unirl.models.wan.plugin import WAN21

# Specs name this module by a plain name.
sys.path.insert(0, str(Path(__file__).parent))

PARITY = "decoded-media-are-those-of-the-reference-pipeline"
MEDIA = (PARITY, "media-has-the-requested-size", "media-lies-between-0-and-1", "decoder-keeps-the-gradient")


class MirroredSd3(Sd3Model):
    def decode(self, latents: Tensor) -> Tensor:
        return super().decode(latents).flip(3)


class UnshiftedSd3(Sd3Model):
    def vae_latents(self, latents: Tensor) -> Tensor:
        return latents / self.vae.config.scaling_factor


class MirroredQwenImage(QwenImageModel):
    def decode(self, latents: Tensor) -> Tensor:
        return super().decode(latents).flip(3)


class UncentredQwenImage(QwenImageModel):
    """The counterpart of a missing shift: its VAE has a mean for each channel."""

    def vae_latents(self, latents: Tensor) -> Tensor:
        mean = latents.new_tensor(self.vae.config.latents_mean)[:, None, None, None]
        return super().vae_latents(latents) - mean


class UnpacksQwenImageByColumns(QwenImageModel):
    """Takes the four places of a patch in the order of columns: those above and right of each other change places."""

    def vae_latents(self, latents: Tensor) -> Tensor:
        places = latents.unflatten(1, (-1, 2, 2)).transpose(2, 3).flatten(1, 3)
        return super().vae_latents(places)


class BackwardsWan21(Wan21Model):
    """Plays the frames in the reverse order."""

    def decode(self, latents: Tensor) -> Tensor:
        return super().decode(latents).flip(1)


BROKEN: dict[str, tuple[ModelSpec, Any]] = {
    "sd3-mirrored": (SD3, MirroredSd3),
    "sd3-no-shift": (SD3, UnshiftedSd3),
    "qwen-image-mirrored": (QWEN_IMAGE, MirroredQwenImage),
    "qwen-image-no-mean": (QWEN_IMAGE, UncentredQwenImage),
    "qwen-image-by-columns": (QWEN_IMAGE, UnpacksQwenImageByColumns),
    "wan21-backwards": (WAN21, BackwardsWan21),
}
WELL = (SD3, QWEN_IMAGE, WAN21)
SPECS = {name: dataclasses.replace(spec, name=name, build="test_decoding:build") for name, (spec, _) in BROKEN.items()}


def build(config: Any, *, device: Any, lazy: bool = False) -> Any:
    model = BROKEN[config.use][1](config, device=device, lazy=lazy)
    model.spec = SPECS[config.use]
    return model


def catalog() -> Catalog:
    well = SimpleNamespace(unirl_models=hookimpl(lambda: list(WELL)))
    broken = SimpleNamespace(unirl_models=hookimpl(lambda: list(SPECS.values())))
    return Catalog.of({"unirl-well": well, "unirl-broken": broken})


@pytest.fixture(scope="module")
def failed() -> dict[str, set[str]]:
    """Model -> the claims about media that fail."""
    names = (*(spec.name for spec in WELL), *BROKEN)
    report = run_suite(Selection(kinds=("model",), claims=MEDIA), catalog="test_decoding:catalog")
    tried = {(outcome.claim, outcome.subject) for outcome in report.outcomes if outcome.state in ("pass", "fail")}
    assert tried == {(claim, name) for claim in MEDIA for name in names}
    return {
        name: {outcome.claim for outcome in report.outcomes if outcome.subject == name and outcome.state == "fail"}
        for name in names
    }


def test_models_that_are_well_decode_what_their_pipelines_decode(failed: dict[str, set[str]]) -> None:
    assert {spec.name: failed[spec.name] for spec in WELL} == {spec.name: set() for spec in WELL}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_decoding_fails_the_comparison_and_nothing_else(failed: dict[str, set[str]], name: str) -> None:
    assert failed[name] == {PARITY}
