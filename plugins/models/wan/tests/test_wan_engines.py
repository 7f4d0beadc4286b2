"""Wan 2.1 and Wan 2.2 from text in SGLang itself, on a CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from external_engines.image_models import *
from external_engines.image_models import started
from external_engines.latents import ROUNDING, Ask, asking, assert_same, gap, trainside
from unirl.conformance.doubles.weight_updates import full_update
from unirl.core.errors import RecipeError
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.models.wan.bridges.sglang import TWO_EXPERTS
from unirl.models.wan.model import Wan22Model, WanModel
from wan_engines import PROMPTS, check_expert
from wan_models import FROM_TEXT, built, write

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.fixture(scope="module", params=FROM_TEXT)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(name: str, model_of: Callable[[str], Any]) -> WanModel:
    """The trained module with the weights of the checkpoint, to be modified by tests."""
    return copy.deepcopy(model_of(name))


@pytest.fixture
def ask(name: str, model: WanModel) -> Ask:
    """Five steps, of which two are at least at the boundary of two experts."""
    frames = 9 if name == "wan21" else 5
    return asking(model, prompts=PROMPTS, frames=frames, height=32, width=48, max_sequence_length=32)


@pytest.fixture(scope="module")
def engine(name: str, model_of: Callable[[str], Any]) -> Iterator[ExternalLatentEngine]:
    with started("sglang", model_of(name)) as result:
        yield result


@pytest.mark.parametrize("name", ["wan21"], indirect=True)
@pytest.mark.parametrize("frames", [1, 5])
def test_videos_of_other_lengths_are_those_of_the_trainer(
    engine: ExternalLatentEngine, model: WanModel, ask: Ask, frames: int
) -> None:
    """One of one frame is an image."""
    engine.load_weights(full_update(model, version=1))
    request = ask(engine, frames=frames, max_sequence_length=512)
    result = engine.generate(request)
    assert result.media is not None
    assert result.media.stacked.shape[1:] == ((3, 32, 48) if frames == 1 else (5, 3, 32, 48))
    assert gap(result, model) < ROUNDING
    assert_same(result, trainside(model, request))


@pytest.mark.parametrize("name", ["wan22"], indirect=True)
@pytest.mark.parametrize("expert", ["transformer", "transformer_2"])
def test_full_weights_and_adapters_of_one_expert_are_sampled_from(
    engine: ExternalLatentEngine, model: Wan22Model, ask: Ask, expert: str
) -> None:
    check_expert(engine, model, ask, expert)


def test_a_boundary_that_sglang_would_round_is_refused(tmp_path: Path) -> None:
    write("wan22", tmp_path, boundary=0.8755)
    model = built("wan22", tmp_path)
    assert "change at 875.5. Use engine=trainside" in TWO_EXPERTS.unfit(model)
    with pytest.raises(RecipeError, match=r"^engine: SGLang rounds timesteps down"), started("sglang", model):
        pass
