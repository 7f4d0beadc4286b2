"""Engines whose rollouts are wrong in one way."""

from __future__ import annotations

import copy
import dataclasses
import threading
from contextlib import nullcontext
from typing import Any

import torch
from unirl.core.request import LatentRequest, Request
from unirl.core.roles import WeightReceipt, WeightUpdate
from unirl.core.rollout import Rollout
from unirl.core.track import Conditions, Status, Track
from unirl.engines.trainside.engine import TrainsideEngine
from unirl.numerics.track_replay import TrackReplay

from conformance_mutants.engine_plain import PlainEngine
from conformance_mutants.mutant import Mutant


class Changes(TrainsideEngine):
    """Generates another request than it was given, and changes what it returns, echoing what was asked."""

    def generate(self, request: Request) -> Rollout:
        self.check(request)
        asked = request
        request = self.request(request)
        tracks = {name: self.wanted(request, latent) for name, latent in request.tracks.items()}
        rollout = super().generate(dataclasses.replace(request, tracks=tracks))
        return Rollout(
            tracks={
                name: self.track(asked, dataclasses.replace(track, segment=_echo(asked, track)))
                for name, track in rollout.tracks.items()
            }
        )

    def check(self, request: Request) -> None:
        self._check(request)

    def request(self, request: Request) -> Request:
        return request

    def wanted(self, request: Request, latent: LatentRequest) -> LatentRequest:
        return latent

    def track(self, request: Request, track: Track) -> Track:
        return track


def _echo(request: Request, track: Track) -> Any:
    """The segment with the settings of a request, whatever it was made with."""
    asked, segment = request.tracks[track.name], track.latent
    sampling = asked.sampling
    return dataclasses.replace(
        segment,
        sigmas=asked.sigmas,
        kernel=dataclasses.replace(segment.kernel, name=sampling.kernel, eta=sampling.eta),
        guidance_scale=sampling.guidance_scale,
        guidance_mode=sampling.guidance_mode,
    )


def _segment(track: Track, **changes: Any) -> Track:
    return dataclasses.replace(track, segment=dataclasses.replace(track.latent, **changes))


class ForgetsParents(Changes):
    def track(self, request: Request, track: Track) -> Track:
        return dataclasses.replace(track, parent_ids=track.group_ids)


class MarksTruncated(Changes):
    def track(self, request: Request, track: Track) -> Track:
        return dataclasses.replace(track, status=(Status.TRUNCATED,) * track.num_rows)


class HalvesImages(Changes):
    def track(self, request: Request, track: Track) -> Track:
        return dataclasses.replace(track, images=None if track.images is None else track.images[..., ::2, ::2])


class SwapsImages(Changes):
    def track(self, request: Request, track: Track) -> Track:
        return dataclasses.replace(track, images=None if track.images is None else track.images.roll(1, 0))


class WidensLatents(Changes):
    def track(self, request: Request, track: Track) -> Track:
        return _segment(track, latents=track.latent.latents.double())


class EchoesVersions(Changes):
    def track(self, request: Request, track: Track) -> Track:
        return dataclasses.replace(track, policy_version=(request.policy_version,) * track.num_rows)


class EchoesDefaultEta(Changes):
    """Where no step is stochastic, so that it made no difference."""

    def track(self, request: Request, track: Track) -> Track:
        kernel = track.latent.kernel
        if track.latent.sde_steps.numel() or kernel.eta == 0:
            return track
        return _segment(track, kernel=dataclasses.replace(kernel, eta=0.7))


class NumbersSamplesItself(Changes):
    """Noise by the number within the group, counted in the request at hand."""

    def request(self, request: Request) -> Request:
        seen: dict[str, int] = {}
        ids: list[str] = []
        for group in request.group_ids:
            ids.append(f"{group}/{seen.get(group, 0)}")
            seen[group] = seen.get(group, 0) + 1
        shares = len(set(request.tracks["image"].noise_ids)) < request.num_rows
        latent = request.tracks["image"]
        latent = latent if shares else dataclasses.replace(latent, noise_ids=tuple(ids))
        return dataclasses.replace(request, sample_ids=tuple(ids), tracks={"image": latent})

    def track(self, request: Request, track: Track) -> Track:
        return dataclasses.replace(track, sample_ids=request.sample_ids)


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


class RoundsEchoedSigmas(Changes):
    """Those of the default request are the same in bf16."""

    def track(self, request: Request, track: Track) -> Track:
        return _segment(track, sigmas=track.latent.sigmas.to(torch.bfloat16).float())


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
        return _segment(track, initial_noise=tuple(a or f for a, f in zip(asked, found, strict=True)))


class SharesStepNoise(Changes):
    """Where a group shares its start."""

    def request(self, request: Request) -> Request:
        return dataclasses.replace(request, sample_ids=request.tracks["image"].noise_ids)

    def generate(self, request: Request) -> Rollout:
        self.check(request)
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
        return _segment(
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
        return _segment(track, sde_steps=request.tracks["image"].sde_steps)


class StoresEverything(Changes):
    def wanted(self, request: Request, latent: LatentRequest) -> LatentRequest:
        return dataclasses.replace(latent, trajectory="full")


class StoresTheWindow(Changes):
    def wanted(self, request: Request, latent: LatentRequest) -> LatentRequest:
        return dataclasses.replace(latent, trajectory="window")


class TakesEulerForDpm2(Changes):
    def wanted(self, request: Request, latent: LatentRequest) -> LatentRequest:
        kernel = "euler" if latent.sampling.kernel == "dpm2" else latent.sampling.kernel
        return dataclasses.replace(latent, sampling=dataclasses.replace(latent.sampling, kernel=kernel))


class SumsLogProbs(Changes):
    """Without guidance; over the elements."""

    def track(self, request: Request, track: Track) -> Track:
        segment = track.latent
        if segment.log_probs is None or segment.guidance_scale != 1.0:
            return track
        return _segment(track, log_probs=segment.log_probs * segment.latents[0, 0].numel())


class ScoresWithoutGuidance(Changes):
    def track(self, request: Request, track: Track) -> Track:
        if track.latent.guidance_scale == 1.0 or not track.latent.sde_steps.numel():
            return track
        bare = _segment(track, guidance_scale=1.0)
        with torch.no_grad():
            replayed = TrackReplay(self._model, stacked=True, policy_context=lambda _: nullcontext())(bare)
        return _segment(track, log_probs=replayed.log_probs)


class IgnoresGuidanceModes(Changes):
    def wanted(self, request: Request, latent: LatentRequest) -> LatentRequest:
        return dataclasses.replace(latent, sampling=dataclasses.replace(latent.sampling, guidance_mode="batched"))


class IgnoresNegatives(Changes):
    def wanted(self, request: Request, latent: LatentRequest) -> LatentRequest:
        return dataclasses.replace(latent, sampling=dataclasses.replace(latent.sampling, negative_prompt=""))


class OrdersConditions(Changes):
    """As if groups stood together."""

    def track(self, request: Request, track: Track) -> Track:
        def sort(one: Conditions) -> Conditions:
            return dataclasses.replace(one, index=one.index.sort().values)

        return dataclasses.replace(track, conditions={name: sort(one) for name, one in track.conditions.items()})


class StaysInEvaluation(TrainsideEngine):
    def generate(self, request: Request) -> Rollout:
        rollout = super().generate(request)
        self._model.trainable.eval()
        return rollout


class DropsOut(TrainsideEngine):
    def generate(self, request: Request) -> Rollout:
        self._check(request)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return Rollout(tracks={name: self._latents(request, name) for name in request.tracks})


class TakesAnyTrack(Changes):
    def generate(self, request: Request) -> Rollout:
        if "image" in request.tracks:
            return super().generate(request)
        known = dataclasses.replace(request, tracks={"image": next(iter(request.tracks.values()))})
        track = super().generate(known).tracks["image"]
        return Rollout(tracks={name: dataclasses.replace(track, name=name) for name in request.tracks})


class TakesAnyKernel(Changes):
    def check(self, request: Request) -> None:
        """Whatever it is."""

    def wanted(self, request: Request, latent: LatentRequest) -> LatentRequest:
        known = latent.sampling.kernel in ("flow-sde", "dance-sde", "cps", "euler", "dpm2")
        if known:
            return latent
        return dataclasses.replace(latent, sampling=dataclasses.replace(latent.sampling, kernel="flow-sde"))


class IgnoresMedia(Changes):
    def check(self, request: Request) -> None:
        """Not the media."""

    def request(self, request: Request) -> Request:
        return dataclasses.replace(request, media=((),) * request.num_rows)


class IgnoresGuidance(PlainEngine):
    def generate(self, request: Request) -> Rollout:
        latent = request.tracks[next(iter(request.tracks))]
        scale = latent.sampling.guidance_scale
        if scale == 1.0 or "image" not in request.tracks:
            return super().generate(request)
        bare = dataclasses.replace(latent, sampling=dataclasses.replace(latent.sampling, guidance_scale=1.0))
        track = super().generate(dataclasses.replace(request, tracks={"image": bare})).tracks["image"]
        return Rollout(tracks={"image": _segment(track, guidance_scale=scale)})


class LeavesAThread(TrainsideEngine):
    def generate(self, request: Request) -> Rollout:
        # It ends by itself, but long after the claim has looked.
        threading.Thread(target=threading.Event().wait, args=(20,), daemon=True).start()
        return super().generate(request)


class ClosesOnce(TrainsideEngine):
    is_closed = False

    def close(self) -> None:
        if self.is_closed:
            raise RuntimeError("closed twice")
        self.is_closed = True


class CopiesTheWeights(TrainsideEngine):
    def __init__(self, config: Any, *, model: Any) -> None:
        super().__init__(config, model=copy.deepcopy(model))
        self._original = model.trainable

    def generate(self, request: Request) -> Rollout:
        self._model.trainable.train(self._original.training)
        return super().generate(request)


class TakesWeightsAnyway(TrainsideEngine):
    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        return WeightReceipt(
            version=update.version, checksum=update.checksum, num_tensors=len(update.tensors), size_bytes=0
        )


def _mutant(claim: str, name: str, broken: str) -> Mutant:
    return Mutant(claim=claim, name=name, broken=broken)


BROKEN: dict[type[TrainsideEngine], Mutant] = {
    kind: _mutant(claim, name, broken)
    for kind, claim, name, broken in (
        (
            ForgetsParents,
            "every-sample-comes-back-with-its-lineage",
            "forgets-parents",
            "gives the group ids as parent ids",
        ),
        (
            MarksTruncated,
            "every-sample-comes-back-with-its-lineage",
            "marks-truncated",
            "calls whole samples truncated",
        ),
        (
            HalvesImages,
            "latents-and-media-are-whole-and-of-the-asked-size",
            "halves-images",
            "returns images of half the size",
        ),
        (SwapsImages, "latents-and-media-are-whole-and-of-the-asked-size", "swaps-images", "images of other rows"),
        (WidensLatents, "latents-and-media-are-whole-and-of-the-asked-size", "widens-latents", "latents as float64"),
        (EchoesVersions, "a-stale-version-is-detected", "echoes-versions", "copies the version of the request"),
        (EchoesDefaultEta, "kernel-and-its-settings-are-echoed", "echoes-default-eta", "echoes eta 0.7 for any"),
        (
            NumbersSamplesItself,
            "samples-do-not-depend-on-how-a-request-is-split",
            "numbers-samples",
            "keys noise by the number within the group of this request",
        ),
        (
            MovesOn,
            "the-same-request-gives-the-same-samples-again",
            "moves-on",
            "draws other noise for a request that comes again",
        ),
        (
            RoundsEchoedSigmas,
            "sigmas-are-echoed-bit-for-bit",
            "rounds-sigmas",
            "echoes the sigmas rounded to bf16",
        ),
        (
            KeepsItsSchedule,
            "sigmas-are-those-that-it-steps-with",
            "keeps-its-schedule",
            "walks its own schedule and echoes the request's",
        ),
        (StartsGroupsAlike, "initial-noise-is-the-recipes", "starts-alike", "gives groups one x_T unasked"),
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
        (
            StoresEverything,
            "a-window-holds-the-latents-around-sde-steps-and-the-end",
            "stores-everything",
            "stores the full trajectory where a window was asked for",
        ),
        (
            StoresTheWindow,
            "a-full-trajectory-holds-every-latent",
            "stores-the-window",
            "stores a window where the full trajectory was asked for",
        ),
        (
            TakesEulerForDpm2,
            "every-kernel-of-the-spec-steps-by-its-formula",
            "takes-euler-for-dpm2",
            "runs euler when dpm2 is asked for",
        ),
        (SumsLogProbs, "log-probs-are-those-of-the-replay", "sums-log-probs", "sums log-probs over the elements"),
        (
            ScoresWithoutGuidance,
            "log-probs-under-guidance-are-those-of-the-replay",
            "scores-without-guidance",
            "scores guided steps with the conditional velocity",
        ),
        (
            IgnoresGuidanceModes,
            "guidance-and-its-mode-are-honoured",
            "ignores-guidance-modes",
            "echoes norm-corrected and does not do it",
        ),
        (
            IgnoresNegatives,
            "negative-prompts-are-used-and-returned",
            "ignores-negatives",
            "always guides away from the empty prompt",
        ),
        (
            OrdersConditions,
            "conditions-are-those-that-it-generated-from",
            "orders-conditions",
            "returns conditions as if groups stood together",
        ),
        (
            StaysInEvaluation,
            "sampling-leaves-torch-and-the-model-as-they-were",
            "stays-in-evaluation",
            "leaves the model in evaluation mode",
        ),
        (DropsOut, "dropout-is-off-while-sampling", "drops-out", "samples in training mode"),
        (TakesAnyTrack, "an-unknown-track-is-refused", "takes-any-track", "generates images for any track"),
        (
            TakesAnyKernel,
            "a-kernel-that-is-not-in-its-spec-is-refused",
            "takes-any-kernel",
            "runs flow-sde for kernels that it does not know",
        ),
        (IgnoresMedia, "media-that-it-does-not-take-are-refused", "ignores-media", "generates from the text alone"),
        (
            IgnoresGuidance,
            "guidance-that-it-does-not-state-is-refused",
            "ignores-guidance",
            "echoes guidance that it did not use",
        ),
        (
            LeavesAThread,
            "closing-leaves-nothing-running-and-may-be-done-twice",
            "leaves-a-thread",
            "a thread outlives close",
        ),
        (
            ClosesOnce,
            "closing-leaves-nothing-running-and-may-be-done-twice",
            "closes-once",
            "raises when it is closed a second time",
        ),
        (
            CopiesTheWeights,
            "shared-weights-are-sampled-as-they-train",
            "copies-the-weights",
            "samples from a copy made at the start",
        ),
        (
            TakesWeightsAnyway,
            "an-engine-that-shares-its-weights-refuses-others",
            "takes-weights-anyway",
            "answers a weight update and drops it",
        ),
    )
}
