"""Engines whose sigmas or noise are wrong in one way."""

from __future__ import annotations

import dataclasses

import torch
from unirl.core.types.request import LatentRequest, Request
from unirl.core.types.track import Track
from unirl.engines.trainside.engine import TrainsideEngine

from conformance_mutants.engine_changes import Changes, everything, segment_with
from conformance_mutants.mutant import mutant, mutants_in


@mutant(claim="sigmas-are-echoed-bit-for-bit", name="rounds-sigmas", breaks="echoes the sigmas rounded to bf16")
class RoundsEchoedSigmas(Changes):
    """Those of the default request are the same in bf16."""

    def track(self, request: Request, track: Track) -> Track:
        return segment_with(track, sigmas=track.latent.sigmas.to(torch.bfloat16).float())


@mutant(claim="echoed-sigmas-are-those-used", breaks="walks its own schedule and echoes the request's")
class KeepsItsSchedule(Changes):
    def wanted(self, request: Request, latent: LatentRequest) -> LatentRequest:
        return dataclasses.replace(latent, sigmas=self._model.schedule(latent.sampling))


# A sample is then not made from its own noise.
@mutant(
    claim="initial-noise-follows-the-seed",
    name="starts-alike",
    breaks="gives groups one x_T unasked",
    also=("every-sample-comes-back-with-its-lineage",),
)
class StartsGroupsAlike(Changes):
    def wanted(self, request: Request, latent: LatentRequest) -> LatentRequest:
        return dataclasses.replace(latent, noise_ids=request.group_ids)


@mutant(claim="a-group-shares-its-initial-noise-on-request", name="starts-apart", breaks="ignores same_initial_noise")
class StartsSamplesApart(Changes):
    def wanted(self, request: Request, latent: LatentRequest) -> LatentRequest:
        return dataclasses.replace(latent, noise_ids=request.sample_ids)


@mutant(claim="echoed-noise-is-the-initial-noise", breaks="copies the request's digests")
class CopiesDigests(Changes):
    def track(self, request: Request, track: Track) -> Track:
        asked, result = request.latent.initial_noise, track.latent.initial_noise
        assert result is not None
        return segment_with(track, initial_noise=tuple(a or f for a, f in zip(asked, result, strict=True)))


@mutant(claim="step-noise-follows-the-seed", breaks="keys step noise by the noise ids")
class SharesStepNoise(Changes):
    """Where a group shares its start."""

    def request(self, request: Request) -> Request:
        return dataclasses.replace(request, sample_ids=request.latent.noise_ids)

    def generate(self, request: Request) -> Track:
        self.check_request(request)
        if len(set(request.latent.noise_ids)) == request.num_rows:
            return TrainsideEngine.generate(self, request)
        # One track cannot hold an id twice, so row by row.
        rows = [super(SharesStepNoise, self).generate(request.select([row])) for row in range(request.num_rows)]
        return Track.concat(rows)

    def track(self, request: Request, track: Track) -> Track:
        return dataclasses.replace(track, sample_ids=request.sample_ids)


@mutant(claim="step-noise-follows-the-seed", name="ignores-the-tree", breaks="keys a tree's step noise by sample ids")
class IgnoresTheTree(Changes):
    def wanted(self, request: Request, latent: LatentRequest) -> LatentRequest:
        return dataclasses.replace(latent, step_noise_ids=None)

    def track(self, request: Request, track: Track) -> Track:
        return segment_with(track, step_noise_ids=request.latent.step_noise_ids)


@mutant(claim="only-requested-steps-are-stochastic", breaks="takes SDE steps for a range")
class FillsGaps(Changes):
    """Takes SDE steps for a range."""

    def wanted(self, request: Request, latent: LatentRequest) -> LatentRequest:
        steps = latent.sde_steps
        if not steps.numel() or bool((steps[:, 1:] - steps[:, :-1] <= 1).all()):
            return latent
        filled = torch.stack([torch.arange(int(row.min()), int(row.max()) + 1) for row in steps])
        return dataclasses.replace(latent, sde_steps=filled, keep=everything(latent))

    def track(self, request: Request, track: Track) -> Track:
        asked, segment = request.latent, track.latent
        steps, places = asked.sde_steps, set(range(segment.num_steps + 1))
        if torch.equal(steps, segment.sde_steps):
            return track
        if not asked.keep.numel():
            places = {int(step) + after for step in steps.flatten() for after in (0, 1)} | {segment.num_steps}
        assert segment.log_probs is not None
        return segment_with(
            track,
            latents=segment.latents[:, sorted(places)],
            positions=segment.positions[:, sorted(places)],
            sde_steps=steps,
            log_probs=segment.log_probs.gather(1, steps - segment.sde_steps[:, :1]),
        )


@mutant(claim="each-group-has-its-own-sde-steps", breaks="uses the first row's SDE steps for all")
class GivesAllTheFirstSteps(Changes):
    def wanted(self, request: Request, latent: LatentRequest) -> LatentRequest:
        return dataclasses.replace(latent, sde_steps=latent.sde_steps[:1].expand_as(latent.sde_steps).clone())

    def track(self, request: Request, track: Track) -> Track:
        return segment_with(track, sde_steps=request.latent.sde_steps)


BROKEN = mutants_in(__name__)
