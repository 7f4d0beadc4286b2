"""Real models whose decoding is broken are caught, by the comparison with their pipelines' media and by no other claim
about numbers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from unirl.conformance.run import run_suite
from unirl.conformance.subjects import Selection
from unirl.core.plugins.catalog import Catalog
from unirl.models.qwen_image.plugin import SPEC as QWEN_IMAGE
from unirl.models.sd3.plugin import SPEC as SD3
from unirl.models.wan.plugin import WAN21

# Specs name this module by a plain name.
sys.path.insert(0, str(Path(__file__).parent))

from conformance_mutants.changes import Change, returns, takes
from conformance_mutants.mutant import Mutant, builder, catalog_of, plugin, specs

pytestmark = pytest.mark.slow

PARITY = "decoded-media-are-those-of-the-reference-pipeline"
MEDIA = (PARITY, "media-has-the-requested-size", "media-lies-between-0-and-1", "decoder-keeps-the-gradient")
HEALTHY = (SD3, QWEN_IMAGE, WAN21)


def broken(spec: Any, name: str, breaks: str, **changes: Change) -> Mutant:
    return Mutant(claim=PARITY, name=f"{spec.name}-{name}", breaks=breaks, spec=spec, changes=changes)


def without_mean(model: Any, vae_latents: Any, latents: Any) -> Any:
    """The counterpart of a missing shift: the VAE has a mean for each channel."""
    return vae_latents(latents) - latents.new_tensor(model.vae.config.latents_mean)[:, None, None, None]


# fmt: off
MUTANTS = [
    broken(SD3, "mirrored", "mirrors its images", decode=returns(lambda images: images.flip(3))),
    broken(SD3, "no-shift", "leaves out the shift of the VAE's latents",
           vae_latents=lambda model, _, latents: latents / model.vae.config.scaling_factor),
    broken(QWEN_IMAGE, "mirrored", "mirrors its images", decode=returns(lambda images: images.flip(3))),
    broken(QWEN_IMAGE, "no-mean", "leaves out the mean of the VAE's latents", vae_latents=without_mean),
    # The places above and right of each other change places.
    broken(QWEN_IMAGE, "by-columns", "takes the four places of a patch in the order of columns",
           vae_latents=takes(lambda latents: latents.unflatten(1, (-1, 2, 2)).transpose(2, 3).flatten(1, 3))),
    broken(WAN21, "backwards", "plays the frames in the reverse order", decode=returns(lambda frames: frames.flip(1))),
]
# fmt: on
build = builder(MUTANTS)


def catalog() -> Catalog:
    return catalog_of(plugin(models=HEALTHY), models=specs(MUTANTS, module="test_decoding"))


@pytest.fixture(scope="module")
def failed() -> dict[str, set[str]]:
    """Model -> the claims about media that fail."""
    names = [part.name for part in (*HEALTHY, *MUTANTS)]
    report = run_suite(Selection(kinds=("model",), claims=MEDIA), catalog="test_decoding:catalog")
    tried = {(outcome.claim, outcome.subject) for outcome in report.outcomes if outcome.state in ("pass", "fail")}
    assert tried == {(claim, name) for claim in MEDIA for name in names}
    return {
        name: {outcome.claim for outcome in report.outcomes if outcome.subject == name and outcome.state == "fail"}
        for name in names
    }


def test_healthy_models_decode_what_their_pipelines_decode(failed: dict[str, set[str]]) -> None:
    assert {spec.name: failed[spec.name] for spec in HEALTHY} == {spec.name: set() for spec in HEALTHY}


@pytest.mark.parametrize("name", [mutant.name for mutant in MUTANTS])
def test_broken_decoding_fails_the_comparison_and_nothing_else(failed: dict[str, set[str]], name: str) -> None:
    assert failed[name] == {PARITY}
