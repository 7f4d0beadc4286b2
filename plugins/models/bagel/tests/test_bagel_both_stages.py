"""A plan and its image, both from one process of vLLM-Omni."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from bagel_runs import SMALL, run
from external_engines.both_stages import *
from external_engines.both_stages import BothStages
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.specs.plan import Stage

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

ENGINE = ("engine@engine.plan=vllm-omni", "engine@engine.image=vllm-omni")


@pytest.fixture(scope="module")
def recipe() -> BothStages:
    """`bagel/unigrpo`, from source images of different sizes."""
    return BothStages("plan", tuple(SMALL), run)


def test_stages_share_an_engine_or_have_their_own_and_texts_need_a_bridge_with_texts(tiny_folder: Path) -> None:
    catalog = Catalog.discover()
    words = [f"model.path={tiny_folder}", "data.train=prompts.txt", *SMALL]
    shared, apart, mixed = (
        compose("bagel/unigrpo", [*words, *engines], catalog=catalog)
        for engines in (ENGINE, [*ENGINE, "engine.plan.max_num_texts=4"], ENGINE[1:])
    )
    for plan, is_shared in ((shared, True), (apart, False), (mixed, False)):
        assert match(plan, catalog=catalog).accepted
        first, second = plan.stages
        assert first.shares_engine(second) is is_shared

    def without_texts(stage: Stage) -> Stage:
        spec = dataclasses.replace(stage.model.spec, bridged_texts=frozenset[str]())
        model = dataclasses.replace(stage.model, spec=spec)
        return dataclasses.replace(stage, learner=dataclasses.replace(stage.learner, model=model))

    assert match(mixed.with_stages(without_texts), catalog=catalog).accepted
    (reason,) = match(shared.with_stages(without_texts), catalog=catalog).reasons
    assert str(reason) == (
        "engine.plan: the bridge of model 'bagel' to engine 'vllm-omni' serves its latent tracks, not its text tracks. "
        "Choose another engine for them, such as trainside."
    )
