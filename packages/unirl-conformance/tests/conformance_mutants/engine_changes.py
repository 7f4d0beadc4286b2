"""Engines that generate another request than they were given: what those are made from whose rollouts are wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor
from unirl.core.types.request import LatentRequest, Request
from unirl.core.types.track import LatentSegment, Track
from unirl.engines.trainside.engine import TrainsideEngine
from unirl.numerics.diffusion.denoise import all_positions

__all__ = ["Changes", "ChangesHonestly", "everything", "segment_with"]


class Changes(TrainsideEngine):
    """Generates another request than it was given, and changes what it returns, echoing what was asked: its echo is a
    lie, unless `echo` says otherwise."""

    def generate(self, request: Request) -> Track:
        self.check_request(request)
        asked = request
        request = self.request(request)
        track = super().generate(dataclasses.replace(request, params=self.wanted(request, request.latent)))
        return self.track(asked, dataclasses.replace(track, segment=self.echo(asked, track)))

    def check_request(self, request: Request) -> None:
        self._check(request)

    def request(self, request: Request) -> Request:
        return request

    def wanted(self, request: Request, latent: LatentRequest) -> LatentRequest:
        return latent

    def track(self, request: Request, track: Track) -> Track:
        return track

    def echo(self, request: Request, track: Track) -> LatentSegment:
        """The segment with the settings of a request, whatever it was made with."""
        asked = request.latent
        return dataclasses.replace(track.latent, sigmas=asked.sigmas, sampler=asked.sampler)


class ChangesHonestly(Changes):
    """Computes something else than was asked for, with an echo that is read off what computed it."""

    def echo(self, request: Request, track: Track) -> LatentSegment:
        return track.latent


def everything(latent: LatentRequest) -> Tensor:
    """What `keep` is when every latent is to come back."""
    return all_positions(latent.num_rows, num_steps=latent.sigmas.shape[0] - 1)


def segment_with(track: Track, **changes: Any) -> Track:
    """The same track with other fields of its segment."""
    return dataclasses.replace(track, segment=dataclasses.replace(track.latent, **changes))
