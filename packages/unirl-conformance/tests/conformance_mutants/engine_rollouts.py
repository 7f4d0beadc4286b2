"""Engines whose samples are wrong in one way: their lineage, their size, their media, what they depend on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor
from unirl.core.types.request import Request
from unirl.core.types.track import Status, Track

from conformance_mutants.engine_changes import Changes, segment_with
from conformance_mutants.mutant import mutant, mutants_in


@mutant(claim="every-sample-comes-back-with-its-lineage", breaks="gives the group ids as parent ids")
class ForgetsParents(Changes):
    def track(self, request: Request, track: Track) -> Track:
        return dataclasses.replace(track, parent_ids=track.group_ids)


@mutant(claim="every-sample-comes-back-with-its-lineage", breaks="gives the track a name of its own")
class NamesItsTrackItself(Changes):
    def track(self, request: Request, track: Track) -> Track:
        return dataclasses.replace(track, name="images")


@mutant(claim="every-sample-comes-back-with-its-lineage", breaks="calls whole samples truncated")
class MarksTruncated(Changes):
    def track(self, request: Request, track: Track) -> Track:
        return dataclasses.replace(track, status=(Status.TRUNCATED,) * track.num_rows)


def with_images(track: Track, change: Callable[[Tensor], Tensor]) -> Track:
    media = track.media and dataclasses.replace(track.media, values=change(track.media.stacked))
    return dataclasses.replace(track, media=media)


@mutant(claim="latents-and-media-have-the-requested-size", breaks="returns images of half the size")
class HalvesImages(Changes):
    def track(self, request: Request, track: Track) -> Track:
        return with_images(track, lambda images: images[..., ::2, ::2])


@mutant(claim="latents-and-media-have-the-requested-size", breaks="images of other rows")
class SwapsImages(Changes):
    def track(self, request: Request, track: Track) -> Track:
        return with_images(track, lambda images: images.roll(1, 0))


@mutant(claim="latents-and-media-have-the-requested-size", breaks="latents as float64")
class WidensLatents(Changes):
    def track(self, request: Request, track: Track) -> Track:
        return segment_with(track, latents=track.latent.latents.double())


@mutant(claim="a-stale-version-is-detected", breaks="copies the version of the request")
class EchoesVersions(Changes):
    def track(self, request: Request, track: Track) -> Track:
        return dataclasses.replace(track, policy_version=(request.policy_version,) * track.num_rows)


@mutant(claim="kernel-and-its-settings-are-echoed", breaks="echoes eta 0.7 for any")
class EchoesDefaultEta(Changes):
    """Where no step is stochastic, so that it made no difference."""

    def track(self, request: Request, track: Track) -> Track:
        sampler = track.latent.sampler
        if track.latent.sde_steps.numel() or sampler.eta == 0:
            return track
        return segment_with(track, sampler=dataclasses.replace(sampler, eta=0.7))


@mutant(
    claim="samples-do-not-depend-on-how-a-request-is-split",
    name="numbers-samples",
    breaks="keys noise by the number within the group of this request",
)
class NumbersSamplesItself(Changes):
    """Noise by the number within the group, counted in the request at hand."""

    def request(self, request: Request) -> Request:
        seen: dict[str, int] = {}
        ids: list[str] = []
        for group in request.group_ids:
            ids.append(f"{group}/{seen.get(group, 0)}")
            seen[group] = seen.get(group, 0) + 1
        latent = request.latent
        shares = len(set(latent.noise_ids)) < request.num_rows
        latent = latent if shares else dataclasses.replace(latent, noise_ids=tuple(ids))
        return dataclasses.replace(request, sample_ids=tuple(ids), params=latent)

    def track(self, request: Request, track: Track) -> Track:
        return dataclasses.replace(track, sample_ids=request.sample_ids)


@mutant(claim="the-same-request-gives-the-same-samples", breaks="draws other noise for a request that comes again")
class MovesOn(Changes):
    """Other noise when it comes back to a seed and rollout that it had before."""

    def __init__(self, config: Any, *, model: Any) -> None:
        super().__init__(config, model=model)
        self._had: list[tuple[int, int]] = []

    def request(self, request: Request) -> Request:
        key = (request.seed, request.rollout)
        comes_back = key in self._had and self._had[-1] != key
        self._had.append(key)
        return dataclasses.replace(request, rollout=request.rollout + 1) if comes_back else request


BROKEN = mutants_in(__name__)
