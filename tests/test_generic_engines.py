"""`model=diffusers` samples what a dedicated model's bridge makes of the same folder in an external engine."""

from __future__ import annotations

import dataclasses
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from external_engines.image_models import started
from external_engines.latents import ROUNDING, adapter, asking, assert_same, trainside
from unirl.conformance.doubles.trained import full_update, perturb, with_adapter
from unirl.core.roles import DiffusionModel
from unirl.core.specs.facts import names_in
from unirl.core.types.request import Request
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.models.diffusers.config import DiffusersConfig
from unirl.models.diffusers.model import build

PROMPTS = ("a red ring", "a blue square on the left of two green discs")
"""Of different lengths."""
GUIDED: dict[str, Any] = {"guidance_mode": "two-pass", "guidance_scale": 3.5, "negative_prompt": "blurred, in grey"}


def check(engine: ExternalLatentEngine, generic: DiffusionModel, request: Request) -> None:
    """The same latents, log-probs and images, each to the bound by which engines equal the dedicated model. Conditions
    have other names and layouts in each model."""
    tracks = [engine.generate(request), trainside(generic, request)]
    assert_same(*(dataclasses.replace(track, conditions={}) for track in tracks))
    one, other = (track.latent.log_probs for track in tracks)
    assert one is not None and other is not None
    assert float((one - other).abs().max()) < ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize(("name", "engine_name"), [("z-image", "vllm-omni"), ("flux2-klein", "sglang")])
def test_an_engine_with_a_dedicated_models_bridge_samples_as_the_generic_model_does(
    name: str, engine_name: str, tmp_path: Path
) -> None:
    """From text, or from source images and text; with all weights, and with an adapter, of the generic model."""
    package = f"unirl.models.{name.replace('-', '_')}"
    folder = tmp_path / "tiny"
    tiny = import_module(f"{package}.tiny")
    tiny.write(folder, seed=0)
    spec = import_module(f"{package}.plugin").SPEC
    module, _, cls = spec.config.partition(":")
    config = getattr(import_module(module), cls)(path=str(folder))
    dedicated: Any = import_module(f"{package}.model").build(config, device="cpu")
    generic = build(DiffusersConfig(path=str(folder)), device="cpu")
    media = [tiny.media(tmp_path, number=number) if spec.tiny.media else () for number in range(len(PROMPTS))]
    ask = asking(generic, prompts=PROMPTS, media=lambda n: media[n], height=32, width=48, max_sequence_length=64)
    with started(engine_name, dedicated) as engine:
        perturb(generic, seed=1)
        engine.load_weights(full_update(generic, version=1))
        request = ask(engine)
        check(engine, generic, request)
        check(engine, generic, ask(engine, **GUIDED))
        before = trainside(generic, request).latent.final
        update, added = adapter(generic, targets=names_in(generic.spec.lora_targets, generic.trainable), version=2)
        engine.load_weights(update)
        with_adapter(generic, added)
        check(engine, generic, ask(engine))
        after = trainside(generic, request).latent.final
        assert float((after - before).abs().max()) > 100 * ROUNDING, "the check does not see an adapter"
