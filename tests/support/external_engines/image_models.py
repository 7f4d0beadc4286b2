"""Tests for every latent engine that runs a model from text: a model's test module imports all of them.

The module has the fixtures `engine`, see `started`, `model`, with the weights of the checkpoint, and `ask`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from unirl.conformance.doubles.weight_updates import full_update, perturb, with_adapter
from unirl.core.errors import DataError
from unirl.core.roles import DiffusionModel
from unirl.core.types.rollout import verify_echo
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.engines.sglang.config import SglangConfig
from unirl.engines.sglang.engine import build as build_sglang
from unirl.engines.sglang.environment import PRODUCT as SGLANG
from unirl.engines.vllm_omni.config import VllmOmniConfig
from unirl.engines.vllm_omni.engine import build as build_vllm_omni
from unirl.engines.vllm_omni.environment import PRODUCT as VLLM_OMNI
from unirl.numerics.media import LoadedImage

from . import environments
from .latents import ROUNDING, Ask, adapter, assert_same, gap, trainside

__all__ = [
    "ENGINES",
    "recipe_words",
    "started",
    "test_a_full_sync_and_adapters_are_sampled_from_and_a_full_sync_ends_them",
    "test_media_that_the_model_does_not_take_are_refused_before_anything_is_sent",
    "test_samples_and_log_probs_are_those_that_the_trainer_would_have_made",
    "test_steps_per_group_and_all_latents_come_back",
]

ENGINES = ("sglang", "vllm-omni 0.30.0")
"""Engines, and an earlier release of one. The claims about engines try every pair with the default releases."""
MAX_NUM_SEQS = 4


@contextlib.contextmanager
def started(engine: str, model: DiffusionModel, **settings: Any) -> Iterator[ExternalLatentEngine]:
    """An engine, and a release where one is named, with batches of at most four. Tests keep its weights as the one before
    left them."""
    name, _, release = engine.partition(" ")
    environments.make(name, release=release)
    settings = {"max_num_seqs": MAX_NUM_SEQS, **settings}
    result = (
        build_sglang(SglangConfig(**settings), model=model, device="cpu")
        if name == "sglang"
        else build_vllm_omni(VllmOmniConfig(release=release, **settings), model=model, device="cpu")
    )
    try:
        yield result
    finally:
        result.close()


def recipe_words(engine: ExternalLatentEngine) -> list[str]:
    """Overrides of a recipe for an engine as `started` starts it."""
    name, interpreter = engine._process.program.name, engine._process.program.python
    product = {"sglang": SGLANG, "vllm-omni": VLLM_OMNI}[name]
    release = next(
        one
        for one in ("", *product.environment.earlier)
        if product.environment.of(one).interpreter("cpu") == interpreter
    )
    return [f"engine={name}", f"engine.release={release}", f"engine.max_num_seqs={MAX_NUM_SEQS}"]


@pytest.mark.parametrize("size", [(32, 48), (64, 32)], ids=["wide", "tall"])
@pytest.mark.parametrize("scale", [1.0, 3.5], ids=["plain", "guided"])
def test_samples_and_log_probs_are_those_that_the_trainer_would_have_made(
    engine: ExternalLatentEngine, model: DiffusionModel, ask: Ask, size: tuple[int, int], scale: float
) -> None:
    """From the same noise, without guidance and with it, by a negative prompt of another length, in two sizes. At most
    ten fp32 forwards with another summation order differ by 1e-6, in latents of order 1 and averaged log-probs."""
    engine.load_weights(full_update(model, version=1))
    guided: dict[str, Any] = {
        "guidance_mode": "two-pass",
        "guidance_scale": scale,
        "negative_prompt": "blurred, in grey",
    }
    request = ask(engine, height=size[0], width=size[1], **(guided if scale > 1 else {}))
    result = engine.generate(request)
    assert gap(result, model) < ROUNDING
    assert_same(result, trainside(model, request))


def test_media_that_the_model_does_not_take_are_refused_before_anything_is_sent(
    engine: ExternalLatentEngine, ask: Ask
) -> None:
    request = ask(engine)
    image = LoadedImage.of(torch.zeros(3, 64, 64), role="condition")
    inputs = dataclasses.replace(request.inputs, media=((image,),) * len(request.inputs.media))
    with pytest.raises(
        DataError, match=rf"sample '{request.sample_ids[0]}', .* got media of role 'condition', expected"
    ):
        engine.generate(dataclasses.replace(request, inputs=inputs))


def test_steps_per_group_and_all_latents_come_back(
    engine: ExternalLatentEngine, model: DiffusionModel, ask: Ask
) -> None:
    engine.load_weights(full_update(model, version=1))
    request = ask(engine, per_group=True, keeps_all=True, same_initial_noise=True)
    track = engine.generate(request)
    verify_echo(request, track)
    assert track.latent.positions.tolist() == [[0, 1, 2, 3, 4, 5]] * 6
    assert gap(track, model) < ROUNDING
    assert_same(track, trainside(model, request))


def test_a_full_sync_and_adapters_are_sampled_from_and_a_full_sync_ends_them(
    engine: ExternalLatentEngine, model: DiffusionModel, ask: Ask
) -> None:
    """Compared with a model with merged weights, W + scale B A. The second adapter is on other layers than the first:
    one that engines rename, and one part of a layer that some engines fuse."""
    engine.load_weights(full_update(model, version=1))
    perturb(model, seed=1)
    assert gap(engine.generate(ask(engine)), model) > 1e-3, "the check does not see weights of an older version"
    update = full_update(model, version=2)
    assert engine.load_weights(update).checksum == update.checksum
    assert gap(engine.generate(ask(engine)), model) < ROUNDING
    every = model.spec.lora_targets
    for version, targets in ((3, every), (4, (every[3], every[1]))):
        update, added = adapter(model, targets=targets, version=version)
        receipt = engine.load_weights(update)
        assert (receipt.num_tensors, receipt.checksum) == (len(update.tensors), update.checksum)
        result = engine.generate(ask(engine))
        assert result.policy_version == (version,) * 6
        assert gap(result, model) > 1e-3, "the check does not see an adapter"
        assert gap(result, with_adapter(copy.deepcopy(model), added)) < ROUNDING
    perturb(model, seed=2)
    engine.load_weights(full_update(model, version=5))
    assert gap(engine.generate(ask(engine)), model) < ROUNDING
