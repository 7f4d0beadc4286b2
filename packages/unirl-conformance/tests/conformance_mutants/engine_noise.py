"""Engines whose sigmas or noise are wrong in one way."""

from __future__ import annotations

import dataclasses

import torch
from unirl.core.request import LatentRequest, Request
from unirl.core.rollout import Rollout
from unirl.core.track import Track
from unirl.engines.trainside.engine import TrainsideEngine

from conformance_mutants.engine_changes import Changes, segment_with
from conformance_mutants.mutant import Mutant


class RoundsEchoedSigmas(Changes):
    """Those of the default request are the same in bf16."""

    def track(self, request: Request, track: Track) -> Track:
        return segment_with(track, sigmas=track.latent.sigmas.to(torch.bfloat16).float())


class KeepsItsSchedule(Changes):
    def wanted(self, request: Request, latent: LatentRequest) -> LatentRequest:
        return dataclasses.replace(latent, sigmas=self._model.schedule(latent.sampling))


class StartsGroupsAlike(Changes):
    def wanted(self, request: Request, latent: LatentRequest) -> LatentRequest:
        return dataclasses.replace(latent, noise_ids=request.group_ids)


class StartsSamplesApart(Changes):
    def wanted(self, request: Request, latent: LatentRequest) -> LatentRequest:
        return dataclasses.replace(latent, noise_ids=request.sample_ids)


class CopiesDigests(Changes):
    def track(self, request: Request, track: Track) -> Track:
        asked, found = request.tracks[track.name].initial_noise, track.latent.initial_noise
        assert found is not None
        return segment_with(track, initial_noise=tuple(a or f for a, f in zip(asked, found, strict=True)))


class SharesStepNoise(Changes):
    """Where a group shares its start."""

    def request(self, request: Request) -> Request:
        return dataclasses.replace(request, sample_ids=request.tracks["image"].noise_ids)

    def generate(self, request: Request) -> Rollout:
        self.check_request(request)
        if len(set(request.tracks[next(iter(request.tracks))].noise_ids)) == request.num_rows:
            return TrainsideEngine.generate(self, request)
        # One track cannot hold an id twice, so row by row.
        rows = [super(SharesStepNoise, self).generate(request.select([row])) for row in range(request.num_rows)]
        return Rollout(tracks={"image": Track.concat([one.tracks["image"] for one in rows])})

    def track(self, request: Request, track: Track) -> Track:
        return dataclasses.replace(track, sample_ids=request.sample_ids)


class FillsGaps(Changes):
    """Takes SDE steps for a range."""

    def wanted(self, request: Request, latent: LatentRequest) -> LatentRequest:
        steps = latent.sde_steps
        if not steps.numel() or bool((steps[:, 1:] - steps[:, :-1] <= 1).all()):
            return latent
        filled = torch.stack([torch.arange(int(row.min()), int(row.max()) + 1) for row in steps])
        return dataclasses.replace(latent, sde_steps=filled, trajectory="full")

    def track(self, request: Request, track: Track) -> Track:
        asked, segment = request.tracks["image"], track.latent
        steps, places = asked.sde_steps, set(range(segment.num_steps + 1))
        if torch.equal(steps, segment.sde_steps):
            return track
        if asked.trajectory == "window":
            places = {int(step) + after for step in steps.flatten() for after in (0, 1)} | {segment.num_steps}
        assert segment.log_probs is not None
        return segment_with(
            track,
            latents=segment.latents[:, sorted(places)],
            positions=segment.positions[:, sorted(places)],
            sde_steps=steps,
            log_probs=segment.log_probs.gather(1, steps - segment.sde_steps[:, :1]),
        )


class GivesAllTheFirstSteps(Changes):
    def wanted(self, request: Request, latent: LatentRequest) -> LatentRequest:
        return dataclasses.replace(latent, sde_steps=latent.sde_steps[:1].expand_as(latent.sde_steps).clone())

    def track(self, request: Request, track: Track) -> Track:
        return segment_with(track, sde_steps=request.tracks["image"].sde_steps)


BROKEN: dict[type[TrainsideEngine], Mutant] = {
    kind: Mutant(claim=claim, name=name, broken=broken, also=tuple(also))
    for kind, claim, name, broken, *also in (
        (RoundsEchoedSigmas, "sigmas-are-echoed-bit-for-bit", "rounds-sigmas", "echoes the sigmas rounded to bf16"),
        (
            KeepsItsSchedule,
            "sigmas-are-those-that-it-steps-with",
            "keeps-its-schedule",
            "walks its own schedule and echoes the request's",
        ),
        (
            StartsGroupsAlike,
            "initial-noise-is-the-recipes",
            "starts-alike",
            "gives groups one x_T unasked",
            # A sample is then not made from its own noise.
            "every-sample-comes-back-with-its-lineage",
        ),
        (
            StartsSamplesApart,
            "a-group-shares-its-initial-noise-where-asked",
            "starts-apart",
            "ignores same_initial_noise",
        ),
        (CopiesDigests, "the-echoed-noise-is-what-it-started-from", "copies-digests", "copies the request's digests"),
        (SharesStepNoise, "step-noise-is-the-recipes", "shares-step-noise", "keys step noise by the noise ids"),
        (FillsGaps, "it-is-stochastic-at-the-asked-steps-alone", "fills-gaps", "takes SDE steps for a range"),
        (
            GivesAllTheFirstSteps,
            "each-group-has-its-own-sde-steps",
            "gives-all-the-first-steps",
            "uses the first row's SDE steps for all",
        ),
    )
}
