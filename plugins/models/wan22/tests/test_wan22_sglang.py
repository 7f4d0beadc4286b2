"""Wan 2.2 from text in SGLang itself, on a CPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from external_engines.image_models import *
from external_engines.image_models import started
from external_engines.latents import ROUNDING, Ask, adapter, asking, assert_same, gap, trainside
from unirl.conformance.doubles.trained import full_update, update_of, with_adapter
from unirl.core.errors import RecipeError
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.models.wan22 import tiny
from unirl.models.wan22.config import Wan22Config
from unirl.models.wan22.model import Wan22Model, build
from unirl.numerics.diffusion.wan_in_sglang import TWO_EXPERTS

pytestmark = pytest.mark.keyed

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


def test_a_boundary_that_sglang_would_round_is_refused(tmp_path: Path) -> None:
    tiny.write(tmp_path, seed=0, boundary=0.8755)
    model = build(Wan22Config(path=str(tmp_path)), device="cpu")
    assert "change at 875.5. Use engine=trainside" in TWO_EXPERTS.unfit(model)
    with pytest.raises(RecipeError, match=r"^engine: SGLang rounds timesteps down"), started("sglang", model):
        pass
