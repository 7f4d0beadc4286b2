"""Latents from an engine, compared with those of the trained module."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from unirl.conformance.doubles.requests import make_request
from unirl.conformance.doubles.weight_updates import lora_update
from unirl.core.roles import DiffusionModel, WeightUpdate
from unirl.core.types.data import MediaRef
from unirl.core.types.request import Request
from unirl.core.types.sampling import LatentSamplingConfig, SdeStepsConfig
from unirl.core.types.track import LatentSegment, Track
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.engines.trainside.config import TrainsideConfig
from unirl.engines.trainside.engine import build as build_trainside
from unirl.numerics.train.track_replay import TrackReplay

__all__ = [
    "ROUNDING",
    "Ask",
    "Fault",
    "adapter",
    "asking",
    "asking_from_frames",
    "assert_same",
    "fault",
    "gap",
    "trainside",
]

Ask = Callable[..., Request]
Fault = Callable[[str], None]
ROUNDING = 1e-5
"""Bound of a difference in log-probs, in nats, and in latents of unit scale: two libraries sum an fp32 forward in
different orders, with errors of a few times 1e-7; log-probs, means over 1024 elements, stay below 2e-6 over five steps.
Weights of another version are off by 5e-3 and more."""


def asking(
    model: DiffusionModel,
    *,
    prompts: Sequence[str],
    media: Callable[[int], tuple[MediaRef, ...]] = lambda number: (),
    **usual: Any,
) -> Ask:
    """Makes requests of two samples for each prompt; the version is the engine's.

    media: of each prompt, by its number.  usual: sampling settings, in addition to five steps of which two are
    stochastic.
    """

    def make(
        engine: ExternalLatentEngine, *, per_group: bool = False, keeps_all: bool = False, **settings: Any
    ) -> Request:
        sde = SdeStepsConfig(mode="random", count=2, per_group=per_group)
        return make_request(
            model,
            LatentSamplingConfig(**{"num_inference_steps": 5, "sde": sde, **usual, **settings}),
            track=next(track for track, kind in model.spec.tracks.items() if kind == "latent"),
            prompts=prompts,
            media=media,
            samples_per_prompt=2,
            policy_version=engine.version,
            keeps_all=keeps_all,
        )

    return make


def asking_from_frames(
    model: DiffusionModel, frame: Callable[..., tuple[MediaRef, ...]], *, prompts: Sequence[str], **usual: Any
) -> Ask:
    """`asking` with a first frame for each prompt, made for the size of the request. frame: takes `number`, `height` and
    `width`."""

    def make(engine: ExternalLatentEngine, **settings: Any) -> Request:
        size = {key: settings.get(key, usual[key]) for key in ("height", "width")}
        ask = asking(model, prompts=prompts, media=lambda number: frame(number=number, **size), **usual)
        return ask(engine, **settings)

    return make


@pytest.fixture
def fault(engine: ExternalLatentEngine) -> Iterator[Fault]:
    """Switches on a fault of the server, see `faults`; all are off at the end."""
    process: Any = engine._process

    def switch(name: str) -> None:
        process.call("fault", {"name": name}, timeout_s=30)

    yield switch
    if process.is_running:
        switch("")


def adapter(model: DiffusionModel, *, targets: tuple[str, ...], version: int) -> tuple[WeightUpdate, dict[str, Tensor]]:
    """An adapter of scale 1.3 for these layers, and what it adds to the weight of each; see `lora_update`."""
    spec = dataclasses.replace(model.spec, lora_targets=targets)
    return lora_update(model, spec, version=version, seed=version, scale=1.3)


def gap(track: Track, model: DiffusionModel) -> float:
    """Largest difference to the trainer's log-probs of the same transitions."""
    replay = TrackReplay(model, stacked=True, policy_context=lambda _: contextlib.nullcontext())
    with torch.no_grad():
        result: Any = replay(track)
    assert track.latent.log_probs is not None
    return float((result.log_probs - track.latent.log_probs).abs().max())


def trainside(model: DiffusionModel, request: Request) -> Track:
    """The track that the trained module makes of the request."""
    engine = build_trainside(TrainsideConfig(), model=model, device="cpu")
    engine.version = request.policy_version
    return engine.generate(request)


def assert_same(found: Track, expected: Track) -> None:
    """Same policy and noise. Pixels are in [0, 1]; a VAE of unit gain keeps the scale of latents. Conditions by their
    largest element: states of a miniature's encoder reach 10, with the errors of sums of that size."""
    one, other = found.latent, expected.latent
    assert isinstance(one, LatentSegment)
    assert found.sample_ids == expected.sample_ids
    assert torch.equal(one.sde_steps, other.sde_steps)
    for row, (own, wanted) in enumerate(zip(one.positions.tolist(), other.positions.tolist(), strict=True)):
        kept = [position for position in wanted if position >= 0]
        assert [position for position in own if position >= 0] == kept
        difference = (one.latents[row, : len(kept)] - other.latents[row, : len(kept)]).abs().max()
        assert float(difference) < ROUNDING * max(1.0, float(other.latents[row].abs().max()))
    if expected.media is None:
        assert found.media is None
    else:
        assert found.media is not None
        # 8 bits: rounding may move a pixel across the middle of two levels.
        assert float((found.media.stacked - expected.media.stacked).abs().max()) < 1 / 255 + ROUNDING
    for kind, wanted in expected.conditions.items():
        own = found.conditions[kind].expanded()
        for name, values in wanted.expanded().items():
            # One tensor per row where rows have several shapes.
            assert type(own[name]) is type(values) and len(own[name]) == len(values), (kind, name)
            for result, value in zip(own[name], values, strict=True):
                largest = max([1.0, *value.abs().flatten().tolist()]) if value.is_floating_point() else 0.0
                torch.testing.assert_close(result, value, rtol=0, atol=ROUNDING * largest)
    assert found.conditions.keys() == expected.conditions.keys()
