"""Sampling settings that a checkpoint rules out are refused when the recipe is composed, as the loaded model would, under
the key that sets them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from unirl.conformance.part_factory import PartFactory
from unirl.core.errors import RecipeError
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog, Found
from unirl.core.recipe.compose import compose
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.model_host.diffusion.pipeline_config import PipelineConfig, parts_in

CATALOG = Catalog.discover()


def gives_sizes(found: Found) -> bool:
    config = CATALOG.resolve(found.spec.config)
    return issubclass(config, PipelineConfig) and config.sizes is not PipelineConfig.sizes


MODELS = [found for found in CATALOG.parts() if found.spec.kind == "model" and gives_sizes(found)]


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PartFactory]:
    factory = PartFactory(CATALOG, tmp_path_factory.mktemp("factory"))
    yield factory
    factory.close()


@pytest.mark.parametrize("found", MODELS, ids=lambda found: found.spec.name)
def test_a_config_refuses_what_the_loaded_model_refuses(found: Found, factory: PartFactory) -> None:
    model: Any = factory.model(found)
    folder = Path(factory.checkpoint(found))
    config = factory.catalog.resolve(found.spec.config)(path=str(folder))
    fits = LatentSamplingConfig(**found.spec.tiny.sampling)
    assert list(config.unfit(fits, parts_in(folder))) == []
    for setting, value in (("height", fits.height + 1), ("width", 0), ("frames", fits.frames + 1)):
        sampling = replace(fits, **{setting: value})
        (reason,) = config.unfit(sampling, parts_in(folder))
        with pytest.raises(RecipeError) as caught:
            model.latent_shape(sampling)
        assert str(caught.value) == f"sampling{reason}" and reason.key == f".{setting}"


@pytest.mark.parametrize(
    ("recipe", "word", "key"),
    [
        ("quickstart-video", "sampling.frames=6", "sampling.frames"),
        ("quickstart-video", "+eval.sampling.frames=9", "eval.sampling.frames"),
        ("quickstart", "+eval.sampling.height=60", "eval.sampling.height"),
        ("quickstart", "+eval.sampling.num_inference_steps=0", "eval.sampling.num_inference_steps"),
        ("quickstart-enhancer", "sampling.image.width=60", "sampling.image.width"),
        ("quickstart-enhancer", "+eval.sampling.image.height=8", "eval.sampling.image.height"),
        ("quickstart-regularised", "sampling.stored.sde.mode=all", "sampling.stored.sde.mode"),
    ],
)
def test_an_override_is_refused_where_it_is_set(recipe: str, word: str, key: str) -> None:
    (reason,) = match(compose(recipe, [word], catalog=CATALOG), catalog=CATALOG).reasons
    assert reason.key == key
