"""Wan 2.2 from text in SGLang itself, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from external_engines.image_models import *
from external_engines.image_models import started
from external_engines.latents import Ask, asking
from unirl.core.errors import RecipeError
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.models.wan22 import tiny
from unirl.models.wan22.config import Wan22Config
from unirl.models.wan22.model import Wan22Model, build
from unirl.numerics.diffusion.wan_in_sglang import TWO_EXPERTS
from wan22_experts import *

PROMPTS = ("a red ring  rolls &amp; stops", "a blue square on the left of two green discs", "")
"""The first is cleaned, the second is longer than its conditions."""


@pytest.fixture
def model(tiny_folder: Path) -> Wan22Model:
    """The trained module with the weights of the checkpoint, to be modified by tests."""
    return build(Wan22Config(path=str(tiny_folder)), device="cpu")


@pytest.fixture
def ask(model: Wan22Model) -> Ask:
    """Five steps, of which two are at least at the boundary."""
    return asking(model, prompts=PROMPTS, frames=5, height=32, width=48, max_sequence_length=32)


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[ExternalLatentEngine]:
    with started("sglang", build(Wan22Config(path=str(tiny_folder)), device="cpu")) as result:
        yield result


def test_a_boundary_that_sglang_would_round_is_refused(tmp_path: Path) -> None:
    tiny.write(tmp_path, seed=0, boundary=0.8755)
    model = build(Wan22Config(path=str(tmp_path)), device="cpu")
    assert "change at 875.5. Use engine=trainside" in TWO_EXPERTS.unfit(model)
    with pytest.raises(RecipeError, match=r"^engine: SGLang rounds timesteps down"), started("sglang", model):
        pass
