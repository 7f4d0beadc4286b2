"""Sampling settings that a checkpoint rules out are refused when the recipe is composed, as the loaded model would, under
the key that sets them; and texts longer than it reads are told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
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

UNTOLD = ("hunyuan-video", "hunyuan-video15", "hunyuan-video15-i2v", "qwen-image-edit", "qwen-image-edit-plus")
"""Models that cannot tell which texts are cut."""


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


@pytest.mark.parametrize("found", MODELS, ids=lambda found: found.spec.name)
def test_a_text_to_which_more_words_add_nothing_is_told_as_cut(found: Found, factory: PartFactory) -> None:
    model: Any = factory.model(found)
    fits = LatentSamplingConfig(**found.spec.tiny.sampling)
    sampling = replace(fits, max_sequence_length=min(fits.max_sequence_length, 48))
    texts = [" ".join("abcdefghijklmnopqrstuvwxyz"[:number]) for number in range(27)]
    told = [model.num_cut([text], sampling=sampling) for text in texts]
    if found.spec.name in UNTOLD:
        assert set(told) == {None}
        return
    # Of Stable Diffusion 3 those of T5, which stand behind CLIP's.
    encoded = [model.encode_texts([text], sampling=sampling)["prompt_embeds"][0] for text in texts]
    read = [each[-sampling.max_sequence_length :] for each in encoded]
    adds_nothing = [torch.equal(one, other) for one, other in pairwise(read)]
    assert any(adds_nothing) and told[:5] == [0] * 5
    # Where words follow in the template, these are cut first.
    assert all(is_cut for is_cut, is_equal in zip(told[1:], adds_nothing, strict=True) if is_equal)
    assert model.num_cut(texts, sampling=sampling) == sum(told)


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
