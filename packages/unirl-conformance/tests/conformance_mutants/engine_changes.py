"""Engines that generate another request than they were given, or change what they return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from unirl.core.specs.capability import Cap
from unirl.core.types.request import LatentRequest, Request
from unirl.core.types.track import Track
from unirl.engines.trainside.plugin import SPEC as TRAINSIDE
from unirl.numerics.diffusion.denoise import all_positions

from conformance_mutants.changes import Change, with_segment
from conformance_mutants.mutant import Mutant

LATENT_ONLY = replace(TRAINSIDE, capabilities=TRAINSIDE.capabilities - {Cap.TEXT_ROLLOUT})
TEXT_ONLY = replace(TRAINSIDE, capabilities=TRAINSIDE.capabilities - {Cap.LATENT_ROLLOUT}, kernels=())

Fields = Mapping[str, Any]
"""Fields of a dataclass that differ."""


def unchanged(*_: Any) -> Fields:
    return {}


def rollout(
    *,
    request: Callable[[Any, Request], Fields] = unchanged,
    params: Callable[[Any, Request], Fields] = unchanged,
    sampling: Callable[[Any], Fields] = unchanged,
    segment: Callable[[Any, Request, Track], Fields] = unchanged,
    track: Callable[[Any, Request, Track], Fields] = unchanged,
    is_honest: bool = False,
) -> Change:
    """A rollout with other fields, of the request before and of the track after it. It echoes what was requested, which
    is a lie where that was changed, unless it is honest and echoes what it computed with.

    request, params, sampling: get the engine and the request, `sampling` its sampling settings alone.
    segment, track: get the engine, the request as it came, and the track.
    """

    def change(engine: Any, generate: Callable[[Request], Track], requested: Request) -> Track:
        used = replace(requested, **request(engine, requested))
        changed: Any = replace(used.params, **params(engine, used))
        changed = replace(changed, sampling=replace(changed.sampling, **sampling(changed.sampling)))
        result = generate(replace(used, params=changed))
        if not is_honest:
            result = with_segment(result, **echo(requested))
        result = with_segment(result, **segment(engine, requested, result))
        return replace(result, **track(engine, requested, result))

    return change


def echo(request: Request) -> Fields:
    """Settings of the request that its segment echoes."""
    if isinstance(request.params, LatentRequest):
        return {"sigmas": request.latent.sigmas, "sampler": request.latent.sampler}
    wanted = request.text
    return {
        "prompt_tokens": wanted.prompt_tokens,
        "temperature": wanted.sampling.temperature,
        "options": wanted.options,
    }


def latents(
    name: str, claim: str, breaks: str, *, also: tuple[str, ...] = (), changes: Fields | None = None, **fields: Any
) -> Mutant:
    """An engine whose rollouts of latents differ in `fields`, see `rollout`."""
    changes = {"_latents": rollout(**fields), **(changes or {})}
    return Mutant(name=name, claim=claim, breaks=breaks, also=also, spec=LATENT_ONLY, changes=changes)


def texts(
    name: str,
    claim: str,
    breaks: str,
    *,
    also: tuple[str, ...] = (),
    changes: Fields | None = None,
    by_rules: bool = False,
    **fields: Any,
) -> Mutant:
    """An engine whose rollouts of text differ in `fields`, see `rollout`.

    by_rules: includes rollouts with the model's token rules, which separate claims cover.
    """
    change = rollout(**fields)

    def drawn_freely(engine: Any, generate: Callable[[Request], Track], requested: Request) -> Track:
        if requested.text.options and not by_rules:
            return generate(requested)
        return change(engine, generate, requested)

    changes = {"_text": drawn_freely, **(changes or {})}
    return Mutant(name=name, claim=claim, breaks=breaks, also=also, spec=TEXT_ONLY, changes=changes)


def with_first_media(_: Any, request: Request) -> Fields:
    """Inputs with the media that their text had first."""
    texts, media = request.inputs.texts, request.inputs.media
    return {"inputs": replace(request.inputs, media=tuple(media[texts.index(text)] for text in texts))}


def everything(request: Request) -> Tensor:
    """The `keep` that returns every latent."""
    return all_positions(request.num_rows, num_steps=request.latent.sigmas.shape[0] - 1)
