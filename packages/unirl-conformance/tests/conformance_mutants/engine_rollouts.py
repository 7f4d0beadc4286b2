"""Engines whose samples, sigmas or noise are wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from unirl.core.types.request import Request
from unirl.core.types.track import Status, Track

from conformance_mutants.engine_changes import Fields, everything, latents

LINEAGE, SIZE = "every-sample-comes-back-with-its-lineage", "latents-and-media-have-the-requested-size"
STEP_NOISE = "step-noise-follows-the-seed"


def images(change: Callable[[Tensor], Tensor]) -> Callable[..., Fields]:
    return lambda _, request, track: {"media": track.media and replace(track.media, values=change(track.media.stacked))}


def default_eta_if_unused(_: Any, request: Request, track: Track) -> Fields:
    """Only where no step is stochastic, so that it makes no difference."""
    sampler = track.latent.sampler
    is_used = track.latent.sde_steps.numel() or sampler.eta == 0
    return {} if is_used else {"sampler": replace(sampler, eta=0.7)}


def numbered(_: Any, request: Request) -> Fields:
    """Ids by the number within the group, counted in the request at hand; where noise is not shared, its keys too."""
    ids = tuple(f"{group}/{request.group_ids[:row].count(group)}" for row, group in enumerate(request.group_ids))
    is_shared = len(set(request.latent.noise_ids)) < request.num_rows
    return {"sample_ids": ids, "params": request.latent if is_shared else replace(request.latent, noise_ids=ids)}


def next_if_it_comes_back(engine: Any, request: Request) -> Fields:
    key, had = (request.seed, request.rollout), vars(engine).setdefault("had", [])
    comes_back = key in had and had[-1] != key
    had.append(key)
    return {"rollout": request.rollout + 1} if comes_back else {}


def with_digests(_: Any, request: Request, track: Track) -> Fields:
    requested, result = request.latent.initial_noise, track.latent.initial_noise
    assert result is not None
    return {"initial_noise": tuple(one or other for one, other in zip(requested, result, strict=True))}


def shares_step_noise(_: Any, generate: Any, request: Request) -> Track:
    """Only where a group shares its start. Row by row, because a track cannot hold an id twice."""
    noise_ids = request.latent.noise_ids
    if len(set(noise_ids)) == request.num_rows:
        return generate(request)
    keyed = replace(request, sample_ids=noise_ids)
    tracks = [generate(keyed.select([row])) for row in range(request.num_rows)]
    return Track.concat(
        [replace(track, sample_ids=(name,)) for track, name in zip(tracks, request.sample_ids, strict=True)]
    )


def has_gaps(request: Request) -> bool:
    steps = request.latent.sde_steps
    return bool(steps.numel()) and not bool((steps[:, 1:] - steps[:, :-1] <= 1).all())


def filled(_: Any, request: Request) -> Fields:
    if not has_gaps(request):
        return {}
    rows = [torch.arange(int(row.min()), int(row.max()) + 1) for row in request.latent.sde_steps]
    return {"sde_steps": torch.stack(rows), "keep": everything(request)}


def as_if_not_filled(_: Any, request: Request, track: Track) -> Fields:
    requested, segment, steps = request.latent, track.latent, request.latent.sde_steps
    if torch.equal(steps, segment.sde_steps):
        return {}
    places = set(range(segment.num_steps + 1))
    if not requested.keep.numel():
        places = {int(step) + after for step in steps.flatten() for after in (0, 1)} | {segment.num_steps}
    assert segment.log_probs is not None
    return {
        "latents": segment.latents[:, sorted(places)],
        "positions": segment.positions[:, sorted(places)],
        "sde_steps": steps,
        "log_probs": segment.log_probs.gather(1, steps - segment.sde_steps[:, :1]),
    }


# fmt: off
MUTANTS = [
    latents("forgets-parents", LINEAGE, "gives the group ids as parent ids",
            track=lambda _, request, track: {"parent_ids": track.group_ids}),
    latents("names-its-track-itself", LINEAGE, "gives the track a name of its own",
            track=lambda _, request, track: {"name": "images"}),
    latents("marks-truncated", LINEAGE, "calls whole samples truncated",
            track=lambda _, request, track: {"status": (Status.TRUNCATED,) * track.num_rows}),
    latents("halves-images", SIZE, "returns images of half the size",
            track=images(lambda values: values[..., ::2, ::2])),
    latents("swaps-images", SIZE, "returns images of other rows", track=images(lambda values: values.roll(1, 0))),
    latents("widens-latents", SIZE, "returns latents as float64",
            segment=lambda _, request, track: {"latents": track.latent.latents.double()}),
    latents("echoes-versions", "a-stale-version-is-detected", "copies the version of the request",
            track=lambda _, request, track: {"policy_version": (request.policy_version,) * track.num_rows}),
    latents("echoes-default-eta", "kernel-and-its-settings-are-echoed", "echoes eta 0.7 for any",
            segment=default_eta_if_unused),
    latents("numbers-samples", "samples-do-not-depend-on-how-a-request-is-split",
            "keys noise by the number within the group of this request", request=numbered,
            track=lambda _, request, track: {"sample_ids": request.sample_ids}),
    latents("moves-on", "the-same-request-gives-the-same-samples", "draws other noise for a request that comes again",
            request=next_if_it_comes_back),
    # The sigmas of the default request are the same in bf16.
    latents("rounds-sigmas", "sigmas-are-echoed-bit-for-bit", "echoes the sigmas rounded to bf16",
            segment=lambda _, request, track: {"sigmas": track.latent.sigmas.bfloat16().float()}),
    latents("keeps-its-schedule", "echoed-sigmas-are-those-used", "walks its own schedule and echoes the request's",
            params=lambda engine, request: {"sigmas": engine._model.schedule(request.latent.sampling)}),
    # A sample is then not made from its own noise.
    latents("starts-alike", "initial-noise-follows-the-seed", "gives groups one x_T unasked", also=(LINEAGE,),
            params=lambda _, request: {"noise_ids": request.group_ids}),
    latents("starts-apart", "a-group-shares-its-initial-noise-on-request", "ignores same_initial_noise",
            params=lambda _, request: {"noise_ids": request.sample_ids}),
    latents("copies-digests", "echoed-noise-is-the-initial-noise", "copies the request's digests",
            segment=with_digests),
    latents("shares-step-noise", STEP_NOISE, "keys step noise by the noise ids",
            changes={"_latents": shares_step_noise}),
    latents("ignores-the-tree", STEP_NOISE, "keys a tree's step noise by sample ids",
            params=lambda _, request: {"step_noise_ids": None},
            segment=lambda _, request, track: {"step_noise_ids": request.latent.step_noise_ids}),
    latents("fills-gaps", "only-requested-steps-are-stochastic", "takes SDE steps for a range",
            params=filled, segment=as_if_not_filled),
    latents("gives-all-the-first-steps", "each-group-has-its-own-sde-steps", "uses the first row's SDE steps for all",
            params=lambda _, request: {
                "sde_steps": request.latent.sde_steps[:1].expand_as(request.latent.sde_steps).clone()},
            segment=lambda _, request, track: {"sde_steps": request.latent.sde_steps}),
]
# fmt: on
