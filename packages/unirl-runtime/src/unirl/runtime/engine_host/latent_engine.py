"""An engine for latents in a process of its own: a request goes there as it is, a rollout comes back, and what the
engine says that it used is compared with what was asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from unirl.core.bridges import bridge_name, import_bridge
from unirl.core.errors import EchoMismatch, RecipeError, RunFailed
from unirl.core.request import Request, TextRequest
from unirl.core.roles import DiffusionModel, Model
from unirl.core.rollout import Rollout, verify_echo
from unirl.core.serial import from_bytes, to_bytes
from unirl.core.spec import EngineSpec
from unirl.core.track import Track

from .hosted import HostedEngine, Hosting

__all__ = ["HostedLatentEngine", "fitting_bridge"]

CONDITION_GAP_FP32 = 1e-3
"""Of a condition's norm: encoders of some dozen layers that add fp32 numbers in other orders are 1e-6 to 1e-5 apart."""
CONDITION_GAP_16_BITS = 5e-2
"""bf16 rounds each number to 2^-9 of it, and a dozen layers add to that; other words are 0.1 and more apart."""


class HostedLatentEngine(HostedEngine):
    """A `unirl.core.roles.Engine`.

    Its program answers, besides what `HostedEngine` asks, `generate`: takes the bytes of a `Request` of one track as
    the tensor `request`, and gives those of the `Rollout` as `rollout`, with what each row was made of, read where it
    was made: `sample_id`, `prompt`, `negative_prompt` (None without guidance), `guidance_scale` and
    `version` of the weights.
    """

    def __init__(self, hosting: Hosting, *, model: Model, kernels: Sequence[str], probe: Request) -> None:
        """Start it, and let it make the rollout of `probe`, whose settings differ from every default: an engine that
        drops one of them is found here. Raises as `HostedEngine`, and RunFailed for such an engine."""
        self._kernels = kernels
        self._probe = probe
        self.batches: tuple[int, ...] = ()
        """Rows of the batch that each row of the last rollout was made in."""
        super().__init__(hosting, model=model)

    def generate(self, request: Request) -> Rollout:
        """Every track of the request, on the model's device.

        Rows do not depend on each other, but for the rounding of a forward at another batch size.
        Raises RecipeError for tracks that the model does not have, kernels not in the spec and prompts with media;
        EchoMismatch when the engine used something else than what was asked for; RunFailed when it died, took too long,
        or does not hold the weights that were asked for.
        """
        with self._lock:
            self._check(request)
            self._refuse_idle()
            if request.policy_version != self.version:
                raise RunFailed(
                    f"{self._name}: samples of version {request.policy_version} were asked for, it holds version "
                    f"{self.version}. Send it the weights first."
                )
            tracks = {name: _placed(self._track(request, name), self._model.device) for name in request.tracks}
            return Rollout(tracks=tracks)

    def _started(self, found: Mapping[str, Any]) -> None:
        try:
            (name,) = self._probe.tracks
            track = self._track(dataclasses.replace(self._probe, policy_version=self.version), name)
            self._compare_conditions(name, track)
        except EchoMismatch as error:
            raise RunFailed(
                f"{self._name} did not do as a request at its start said, so its rollouts cannot be trained on: {error}"
            ) from error

    def _track(self, request: Request, name: str) -> Track:
        asked = dataclasses.replace(request, tracks={name: request.tracks[name]})
        data = torch.frombuffer(bytearray(to_bytes(asked)), dtype=torch.uint8)
        used, found = self._generate({}, {"request": data})
        rollout = cast(Rollout, from_bytes(found["rollout"].numpy().tobytes()))
        self._compare(asked, name, used)
        self.batches = tuple(used["batches"])
        track = dataclasses.replace(rollout.tracks[name], policy_version=tuple(used["version"]))
        verify_echo(asked, Rollout(tracks={name: track}))
        return track

    def _compare(self, request: Request, name: str, used: Mapping[str, Any]) -> None:
        """What `verify_echo` does not see: which row was made from what."""
        sampling = request.latent(name).sampling
        negative = sampling.negative_prompt if sampling.guidance_scale != 1.0 else None
        wanted = {
            "sample_id": list(request.sample_ids),
            "prompt": list(request.prompts),
            "negative_prompt": [negative] * request.num_rows,
            "guidance_scale": [sampling.guidance_scale] * request.num_rows,
            "version": [self.version] * request.num_rows,
        }
        for what, values in wanted.items():
            for row, (asked, found) in enumerate(zip(values, used[what], strict=True)):
                if asked != found:
                    raise EchoMismatch(
                        f"{name}.{what} of row {row}: the request says {asked!r}, {self._name} used {found!r}. Its "
                        "rows are in another order, or it dropped a field."
                    )

    def _compare_conditions(self, name: str, track: Track) -> None:
        """That the probe's prompts became what the model makes of them. Replays take what came back, so ratios and gaps
        are perfect whatever it was made from."""
        sampling = self._probe.latent(name).sampling
        model = cast("DiffusionModel", self._model)
        negatives = (sampling.negative_prompt,) * self._probe.num_rows
        for kind, prompts in (("positive", self._probe.prompts), ("negative", negatives)):
            wanted, found = model.encode(prompts, sampling=sampling), track.conditions[kind].expanded()
            for part in sorted(wanted.keys() | found.keys()):
                gap = _condition_gap(wanted.get(part), found.get(part))
                if gap:
                    raise EchoMismatch(
                        f"{name}.conditions[{kind!r}][{part!r}]: {self._name} made something else of "
                        f"{prompts[0]!r} than the model does: {gap}. Look at its tokenizer, at the length that prompts "
                        "are padded to and at the order of the encoders."
                    )

    def _check(self, request: Request) -> None:
        known = self._model.spec.tracks
        for name, wanted in request.tracks.items():
            if isinstance(wanted, TextRequest) or known.get(name) != "latent":
                raise RecipeError(
                    f"sampling: track {name!r} was asked for; {self._name} generates latents, and model "
                    f"{self._model.spec.name!r} has {', '.join(f'{track} ({kind})' for track, kind in known.items())}."
                )
            if wanted.sampling.kernel not in self._kernels:
                raise RecipeError(
                    f"sampling.kernel: {wanted.sampling.kernel!r} was asked for; {self._name} runs "
                    f"{', '.join(self._kernels)}."
                )
        for prompt_id, media in zip(request.prompt_ids, request.media, strict=True):
            if media:
                raise RecipeError(
                    f"data: prompt {prompt_id!r} has media ({media[0].uri}); {self._name} takes text prompts only."
                )


def fitting_bridge(model: Model, engine: EngineSpec) -> tuple[str, Any]:
    """`"module:attribute"` of the bridge between the two, and the bridge. Raises RecipeError when its `unfit` says why
    the model, as it was set up, is not what the engine computes."""
    bridge = import_bridge(model.spec, engine)
    if why := bridge.unfit(model):
        raise RecipeError(f"engine: {why}")
    return bridge_name(model.spec, engine), bridge


def _condition_gap(wanted: torch.Tensor | None, found: torch.Tensor | None) -> str:
    """How a condition differs by more than rounding; empty when it does not."""
    if wanted is None or found is None:
        return f"{'the model' if wanted is None else 'the engine'} has none"
    if wanted.shape != found.shape:
        return f"it has the shape {list(found.shape)}, the model's has {list(wanted.shape)}"
    is_fp32 = wanted.dtype == found.dtype == torch.float32
    one, other = wanted.double().cpu(), found.double().cpu()
    gap = float((other - one).norm() / one.norm().clamp_min(1e-12))
    bound = CONDITION_GAP_FP32 if is_fp32 else CONDITION_GAP_16_BITS
    return "" if gap <= bound else f"they differ by {gap:.2g} of its norm, and rounding explains {bound:g}"


def _placed(track: Track, device: Any) -> Track:
    """What is computed with on the device; what is compared with a request stays where requests are."""
    segment = track.latent
    log_probs = None if segment.log_probs is None else segment.log_probs.to(device)
    return dataclasses.replace(
        track,
        segment=dataclasses.replace(segment, latents=segment.latents.to(device), log_probs=log_probs),
        conditions={kind: one.to(device) for kind, one in track.conditions.items()},
        images=None if track.images is None else track.images.to(device),
        videos=None if track.videos is None else tuple(video.to(device) for video in track.videos),
    )
