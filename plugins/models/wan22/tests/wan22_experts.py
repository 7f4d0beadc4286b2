"""A test for engines that run both experts, with the fixtures of `external_engines.image_models`."""

from __future__ import annotations

import copy

import pytest
import torch
from external_engines.latents import ROUNDING, Ask, adapter, assert_same, gap, trainside
from unirl.conformance.doubles.trained import full_update, update_of, with_adapter
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.models.wan22.model import Wan22Model

__all__ = ["test_full_weights_and_adapters_of_one_expert_are_sampled_from"]


@pytest.mark.parametrize("expert", ["transformer", "transformer_2"])
def test_full_weights_and_adapters_of_one_expert_are_sampled_from(
    engine: ExternalLatentEngine, model: Wan22Model, ask: Ask, expert: str
) -> None:
    engine.load_weights(full_update(model, version=1))
    before = engine.generate(ask(engine, num_inference_steps=4))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.trainable.get_submodule(expert).parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=generator))
    engine.load_weights(full_update(model, version=2))
    request = ask(engine, num_inference_steps=4)
    result = engine.generate(request)
    assert gap(result, model) < ROUNDING
    assert_same(result, trainside(model, request))
    assert float((result.latent.latents - before.latent.latents).abs().max()) > 1e-3

    update, added = adapter(model, targets=model.spec.lora_targets, version=3)
    tensors = {name: value for name, value in update.tensors.items() if name.startswith(f"{expert}.")}
    assert 0 < len(tensors) < len(update.tensors)
    engine.load_weights(update_of(tensors, version=3, kind="lora", scale=update.adapter_scale))
    own = {name: value for name, value in added.items() if name.startswith(f"{expert}.")}
    merged = with_adapter(copy.deepcopy(model), own)
    request = ask(engine, num_inference_steps=4)
    adapted = engine.generate(request)
    assert gap(adapted, merged) < ROUNDING
    assert_same(adapted, trainside(merged, request))
    assert float((adapted.latent.latents - result.latent.latents).abs().max()) > 1e-3
