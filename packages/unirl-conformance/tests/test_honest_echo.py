"""An engine that computes something else than requested is caught by its echo, before anything is trained on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from unirl.conformance.doubles import tiny_decoder as text_model
from unirl.conformance.doubles import tiny_denoiser as latent_model
from unirl.conformance.doubles.requests import make_request
from unirl.core.errors import EchoMismatch
from unirl.core.types.request import Request
from unirl.core.types.rollout import verify_echo
from unirl.core.types.sampling import LatentSamplingConfig, SdeStepsConfig, TextSamplingConfig
from unirl.engines.trainside.config import TrainsideConfig
from unirl.engines.trainside.engine import TrainsideEngine

sys.path.insert(0, str(Path(__file__).parent))

from conformance_mutants import engine

LATENT = LatentSamplingConfig(
    num_inference_steps=4,
    kernel="cps",
    eta=0.6,
    kernel_options={"constants": False},
    guidance_scale=3.0,
    guidance_mode="norm-corrected",
    negative_prompt="blurry",
    sde=SdeStepsConfig(mode="fixed", steps=[1, 2], train_fraction=0.5),
)
TEXT = TextSamplingConfig(temperature=0.6, max_new_tokens=3)


def latents() -> tuple[Any, Request]:
    model = latent_model.TinyDenoiser()
    (track,) = (name for name, kind in model.spec.tracks.items() if kind == "latent")
    return model, make_request(model, LATENT, track=track)


def texts() -> tuple[Any, Request]:
    model = text_model.TinyDecoder()
    (track,) = (name for name, kind in model.spec.tracks.items() if kind == "text")
    return model, make_request(model, TEXT, track=track)


@pytest.mark.parametrize("made", [latents, texts], ids=["latent", "text"])
def test_the_echo_of_a_healthy_engine_passes(made: Any) -> None:
    model, request = made()
    verify_echo(request, TrainsideEngine(TrainsideConfig(), model=model).generate(request))


@pytest.mark.parametrize(
    ("name", "made", "says"),
    [
        ("drops-kernel-options", latents, r"sampler\.options.*False.* the engine used .*True"),
        ("has-one-guidance-mode", latents, r"guidance_mode.*'norm-corrected', the engine used 'batched'"),
        ("scores-every-step", latents, r"train_steps: the request says .*, the engine used None"),
        ("has-one-temperature", texts, r"temperature: the request says 0\.6, the engine used 1\.0"),
        ("drops-the-first-token", texts, r"prompt_tokens\[0\]: the request says tensor"),
    ],
)
def test_an_engine_that_computes_something_else_is_caught_by_its_echo(name: str, made: Any, says: str) -> None:
    (mutant,) = (mutant for mutant in engine.MUTANTS if mutant.name == name)
    model, request = made()
    track = mutant.build(TrainsideConfig(), model=model, device="cpu").generate(request)
    with pytest.raises(EchoMismatch, match=says):
        verify_echo(request, track)
