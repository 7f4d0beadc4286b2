"""Tests and fixtures of `external_engines` for engines that run Wan: a test module imports all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from external_engines.edits import check_edit_run
from external_engines.image_models import ENGINES, started
from external_engines.latents import ROUNDING, Ask, adapter, asking_from_frames, assert_same, gap, trainside
from unirl.conformance.doubles.weight_updates import full_update, update_of, with_adapter
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.models.wan.model import WanFirstFrame, WanModel
from unirl.models.wan.tiny import first_frame

__all__ = ["PROMPTS", "ask", "check_expert", "check_frame_run", "edit", "engine", "model"]

PROMPTS = ("a red ring  rolls &amp; stops", "a blue square on the left of two green discs", "")
"""The first is cleaned, the second is longer than its conditions where these have 32 tokens."""


@pytest.fixture
def model(name: str, model_of: Callable[[str], Any]) -> WanFirstFrame:
    """The trained module with the weights of the checkpoint, to be modified by tests."""
    return copy.deepcopy(model_of(name))


@pytest.fixture
def ask(model: WanFirstFrame, tmp_path: Path) -> Ask:
    """First frames of three sizes, most of another ratio than the video by a few per cent. Five steps reach both experts,
    where there are two."""
    # Beside features of images the transformer takes no other length.
    length = 512 if model.transformer.config.image_dim else 32
    usual = {"height": 32, "width": 48, "frames": 9, "max_sequence_length": length}
    return asking_from_frames(model, partial(first_frame, tmp_path), prompts=PROMPTS, **usual)


@pytest.fixture
def edit(ask: Ask) -> Ask:
    return ask


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, name: str, model_of: Callable[[str], Any]) -> Iterator[ExternalLatentEngine]:
    with started(request.param, model_of(name)) as result:
        yield result


def check_frame_run(
    words: Sequence[str],
    *,
    engine: ExternalLatentEngine,
    model: WanFirstFrame,
    checkpoint: Path,
    folder: Path,
) -> None:
    """Two steps of the model's recipe from two first frames, see `check_edit_run`."""
    every = [f"model.path={checkpoint}", "model.dtype=float32", "sampling.frames=5", "train.micro_batch_size=2"]
    media = [first_frame(folder, number=number, height=32, width=48) for number in range(2)]
    recipe = f"{model.spec.name}/flow-grpo"
    check_edit_run(recipe, [*every, *words], engine=engine, model=model, media=media, folder=folder)


def check_expert(engine: ExternalLatentEngine, model: WanModel, ask: Ask, expert: str) -> None:
    """Full weights and adapters of one expert of two are sampled from."""
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

    update, added = adapter(model, targets=tuple(model.spec.lora_targets), version=3)
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
