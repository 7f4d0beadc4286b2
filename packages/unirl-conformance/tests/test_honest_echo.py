"""An engine that computes something else than requested is caught by its echo, before anything is trained on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from unirl.conformance.doubles import model as latent_model
from unirl.conformance.doubles import text_model
from unirl.conformance.doubles.requests import make_request, make_text_request
from unirl.core.errors import EchoMismatch
from unirl.core.types.request import Request
from unirl.core.types.rollout import verify_echo
from unirl.core.types.sampling import LatentSamplingConfig, SdeStepsConfig, TextSamplingConfig
from unirl.engines.trainside.config import TrainsideConfig
from unirl.engines.trainside.engine import TrainsideEngine

sys.path.insert(0, str(Path(__file__).parent))

from conformance_mutants import engine_text, engine_trajectories

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
    model = latent_model.WorkbenchModel()
    (track,) = (name for name, kind in model.spec.tracks.items() if kind == "latent")
    return model, make_request(model, LATENT, track=track)


def texts() -> tuple[Any, Request]:
    model = text_model.TextWorkbenchModel()
    (track,) = (name for name, kind in model.spec.tracks.items() if kind == "text")
    return model, make_text_request(model, TEXT, track=track)


@pytest.mark.parametrize("made", [latents, texts], ids=["latent", "text"])
def test_the_echo_of_an_engine_that_is_well_passes(made: Any) -> None:
    model, request = made()
    verify_echo(request, TrainsideEngine(TrainsideConfig(), model=model).generate(request))


@pytest.mark.parametrize(
    ("kind", "made", "says"),
    [
        (engine_trajectories.DropsKernelOptions, latents, r"sampler\.options.*False.* the engine used .*True"),
        (
            engine_trajectories.HasOneGuidanceMode,
            latents,
            r"guidance_mode.*'norm-corrected', the engine used 'batched'",
        ),
        (engine_trajectories.ScoresEveryStep, latents, r"train_steps: the request says .*, the engine used None"),
        (engine_text.HasOneTemperature, texts, r"temperature: the request says 0\.6, the engine used 1\.0"),
        (engine_text.DropsTheFirstToken, texts, r"prompt_tokens\[0\]: the request says tensor"),
    ],
    ids=["kernel option", "guidance mode", "train steps", "temperature", "prompt token"],
)
def test_an_engine_that_computes_something_else_is_caught_by_its_echo(
    kind: type[TrainsideEngine], made: Any, says: str
) -> None:
    model, request = made()
    track = kind(TrainsideConfig(), model=model).generate(request)
    with pytest.raises(EchoMismatch, match=says):
        verify_echo(request, track)
