"""External engine for latents: sends the request unchanged, with its media in files, receives a track, and checks the
settings and media the engine reports having used against the request. With a text half it generates texts, too."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from unirl.core.errors import DataError, EchoMismatch, RecipeError, RunFailed
from unirl.core.plugins.bridges import bridge_name, import_bridge
from unirl.core.roles import DiffusionModel, Model
from unirl.core.specs.spec import EngineSpec
from unirl.core.types.array import Ragged
from unirl.core.types.request import Request, TextRequest
from unirl.core.types.rollout import verify_echo
from unirl.core.types.serial import from_bytes, to_bytes
from unirl.core.types.track import Track
from unirl.model_host.diffusion.pipeline_model import PipelineModel
from unirl.numerics.diffusion.rollout import branch_inputs, encoded

from .external import ExternalEngine, Hosting
from .sent_media import SentMedia, sent_media
from .text_engine import ExternalTexts

__all__ = ["ExternalLatentEngine", "fitting_bridge"]

CONDITION_GAP_FP32 = 1e-3
"""Relative to a condition's norm. Encoders of a few dozen layers with another fp32 summation order differ by 1e-6 to
1e-5."""
CONDITION_GAP_16_BITS = 5e-2
"""bf16 rounds to a relative 2^-9, which a dozen layers accumulate; different prompts differ by 0.1 or more."""


class ExternalLatentEngine(ExternalEngine):
    """A `unirl.core.roles.Engine`.

    Besides the calls of `ExternalEngine` its program answers `generate`: takes the bytes of a `Request` as the tensor
    `request`, its media as files of `received_media`, and returns those of the `Track` as `track`, with the inputs of
    each row as the worker used them: `sample_id`, `text`, `negative_prompt` (None without guidance), `sources` (branch
    of the guidance -> what was encoded for it besides the text, see `echoed`) and `version` of the weights.
    """

    def __init__(
        self,
        hosting: Hosting,
        *,
        model: DiffusionModel,
        kernels: Sequence[str],
        probes: Sequence[Request],
        texts: ExternalTexts | None = None,
    ) -> None:
        """Start the engine and have it generate `probes`, whose settings all differ from their defaults, to detect an
        engine that ignores one. Raises as `ExternalEngine`, and RunFailed for such an engine.

        texts: of an engine that also generates the model's texts, in the same process and with the same weights.
        """
        self._kernels, self._texts = kernels, texts
        self._encoder = model
        self._probes = probes
        self.batches: tuple[int, ...] = ()
        """Batch size in which each row of the last track was generated."""
        super().__init__(hosting, model=model)

    def generate(self, request: Request) -> Track:
        """The track of the request, on the model's device; of texts see `ExternalTexts`.

        Rows are independent up to the rounding of a forward at another batch size.
        Raises RecipeError for an unknown track and kernels not in the spec; DataError, before sending, for media of
        roles the model has no input for, unreadable files, missing media and first frames of another ratio than the
        video's; EchoMismatch when the engine used different settings or media; RunFailed when it died, timed out, or
        does not hold the requested weights.
        """
        with self._lock:
            texts = self._texts if isinstance(request.params, TextRequest) else None
            if texts is None:
                self._check(request)
            else:
                texts.check(request.text)
            self._refuse_idle()
            if request.policy_version != self.version:
                raise RunFailed(
                    f"{self._name}: got a request for weights version {request.policy_version}, but it holds version "
                    f"{self.version}. Send it the weights first."
                )
            if texts is not None:
                return texts.track(request, generate=self._generate, version=self.version)
            return _placed(self._track(request), self._model.device)

    def _started(self, found: Mapping[str, Any]) -> None:
        if self._texts is not None:
            self._texts.started(found)
        try:
            for probe in self._probes:
                request = dataclasses.replace(probe, policy_version=self.version)
                self._compare_conditions(request, self._track(request))
        except EchoMismatch as error:
            raise RunFailed(
                f"{self._name} did not follow the probe request at start-up, so its rollouts cannot be trusted: {error}"
            ) from error
        if isinstance(self._encoder, PipelineModel) and torch.device(self._encoder.device).type != "cpu":
            # The engine has encoders of its own; only its next start is compared with these.
            self._encoder.offload_idle("encode")

    def _track(self, request: Request) -> Track:
        with sent_media(request.inputs, folder=self._hosting.transfer_dir) as sent:
            asked = dataclasses.replace(request, inputs=sent.inputs)
            data = torch.frombuffer(bytearray(to_bytes(asked)), dtype=torch.uint8)
            used, result = self._generate({}, {"request": data})
        track = from_bytes(result["track"].numpy().tobytes(), Track)
        self._compare(asked, sent, used)
        self.batches = tuple(used["batches"])
        verify_echo(request, track)
        # With the original references; those sent are gone.
        return dataclasses.replace(track, inputs=request.inputs)

    def _compare(self, request: Request, sent: SentMedia, used: Mapping[str, Any]) -> None:
        """Checks the inputs of each row, which `verify_echo` does not see."""
        branches = branch_inputs(request)
        negative = request.latent.sampling.negative_prompt if "negative" in branches else None
        sources = {branch: sent.of(inputs) for branch, inputs in branches.items()}
        expected = {
            "sample_id": list(request.sample_ids),
            "text": list(request.inputs.texts),
            "negative_prompt": [negative] * request.num_rows,
            "sources": [{branch: own[row] for branch, own in sources.items()} for row in range(request.num_rows)],
            "version": [self.version] * request.num_rows,
        }
        for what, values in expected.items():
            for row, (asked, result) in enumerate(zip(values, used[what], strict=True)):
                if asked != result:
                    raise EchoMismatch(
                        f"{request.track}.{what} of row {row}: the request says {asked!r}, {self._name} used "
                        f"{result!r}. Its rows are out of order, or it dropped a field."
                    )

    def _compare_conditions(self, probe: Request, track: Track) -> None:
        """Compares the probe's conditions with the model's own. Training reuses the returned conditions, so ratios and
        log-prob mismatch look perfect even if they were encoded wrongly."""
        sampling = probe.latent.sampling
        for kind, inputs in branch_inputs(probe).items():
            expected = encoded(self._encoder, inputs, sampling=sampling).expanded()
            result = track.conditions[kind].expanded()
            for part in sorted(expected.keys() | result.keys()):
                gap = _condition_gap(expected.get(part), result.get(part))
                if gap:
                    raise EchoMismatch(
                        f"{track.name}.conditions[{kind!r}][{part!r}]: {self._name} encodes {inputs.texts[0]!r} "
                        f"differently from the model: {gap}. Check its tokenizer, the padded prompt length, the "
                        "order of the encoders and the scaling of source images."
                    )

    def _check(self, request: Request) -> None:
        known, expected = self._model.spec.tracks, request.params
        if isinstance(expected, TextRequest) or "latent" not in known.values():
            raise RecipeError(
                f"sampling: got track {request.track!r}, but {self._name} generates latents, and model "
                f"{self._model.spec.name!r} has {', '.join(f'{track} ({kind})' for track, kind in known.items())}."
            )
        self._check_media(request)
        if expected.sampling.kernel not in self._kernels:
            raise RecipeError(
                f"sampling.kernel: got {expected.sampling.kernel!r}; {self._name} supports {', '.join(self._kernels)}."
            )

    def _check_media(self, request: Request) -> None:
        # Not by the request's track: it has the name of its stage.
        tracks = [track for track, kind in self._model.spec.tracks.items() if kind == "latent"]
        roles = {role: use for track in tracks for role, use in self._model.spec.inputs.get(track, {}).items()}
        needs = {role: use for role, use in roles.items() if use != "takes"}
        has_media = [bool(media) for media in request.inputs.media]
        for row, (name, media) in enumerate(zip(request.sample_ids, request.inputs.media, strict=True)):
            given = [ref.role for ref in media]
            unfit = [r for r in needs if r not in given or (needs[r] == "needs one" and given.count(r) > 1)]
            problem = ""
            if other := [role for role in given if role not in roles]:
                problem = f"got media of role {other[0]!r}, expected {' or '.join(roles) or 'none'}"
            elif unfit:
                problem = f"got {given.count(unfit[0]) or 'no'} media of role {unfit[0]!r}, of which it needs one"
            elif has_media[row] != has_media[0]:
                # Conditions of both kinds cannot be joined: the engine encodes each prompt alone.
                problem = (
                    f"got {len(given)} source images, where sample {request.sample_ids[0]!r} has "
                    f"{len(request.inputs.media[0])}; expected some for all prompts, or for none"
                )
            if problem:
                raise DataError(f"sample {name!r}, model {self._model.spec.name!r}: {problem}. Change the prompt file.")
        # By its attribute: a model may be lent through a stand-in. See `unirl.model_host.diffusion.first_frame`.
        check = getattr(self._encoder, "first_frame", None)
        if check is not None:
            inputs, sampling = request.inputs, request.latent.sampling
            for media, text in dict(zip(inputs.media, inputs.texts, strict=True)).items():
                check(media, sampling, prompt=repr(text))


def fitting_bridge(model: Model, engine: EngineSpec) -> tuple[str, Any]:
    """The bridge between the two, with its `"module:attribute"`. Raises RecipeError when its `unfit` reports that the
    engine computes something else than the model as configured."""
    bridge = import_bridge(model.spec, engine)
    if why := bridge.unfit(model):
        raise RecipeError(f"engine: {why}")
    return bridge_name(model.spec, engine), bridge


def _condition_gap(wanted: Ragged | None, found: Ragged | None) -> str:
    """How a condition differs beyond rounding; empty when it does not."""
    if wanted is None or found is None:
        return f"{'the model' if wanted is None else 'the engine'} has none"
    if isinstance(wanted, tuple) or isinstance(found, tuple):
        if type(wanted) is not type(found) or len(wanted) != len(found):
            return f"got {type(found).__name__} of {len(found)}, expected {type(wanted).__name__} of {len(wanted)}"
        return next(filter(None, map(_condition_gap, wanted, found)), "")
    if wanted.shape != found.shape:
        return f"got shape {list(found.shape)}, expected {list(wanted.shape)}"
    is_fp32 = wanted.dtype == found.dtype == torch.float32
    one, other = wanted.double().cpu(), found.double().cpu()
    gap = float((other - one).norm() / one.norm().clamp_min(1e-12))
    bound = CONDITION_GAP_FP32 if is_fp32 else CONDITION_GAP_16_BITS
    return "" if gap <= bound else f"they differ by {gap:.2g} of the norm, but rounding accounts for {bound:g} at most"


def _placed(track: Track, device: Any) -> Track:
    """Moves tensors used in computation to the device; those compared with a request stay with the request."""
    segment = track.latent
    log_probs = None if segment.log_probs is None else segment.log_probs.to(device)
    return dataclasses.replace(
        track,
        segment=dataclasses.replace(segment, latents=segment.latents.to(device), log_probs=log_probs),
        conditions={kind: one.to(device) for kind, one in track.conditions.items()},
        media=None if track.media is None else track.media.to(device),
    )
