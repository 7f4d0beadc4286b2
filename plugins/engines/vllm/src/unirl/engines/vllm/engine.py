"""The engine: requests go to vLLM as tokens, texts come back with the log-probs of the policy that sampled them."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any, cast

import torch
from unirl.core.errors import EchoMismatch, RecipeError, RunFailed
from unirl.core.request import Request, TextRequest
from unirl.core.roles import Model, TextModel, WeightReceipt, WeightUpdate
from unirl.core.rollout import Rollout
from unirl.core.track import Track
from unirl.numerics.text_rollout import GeneratedText, text_track, visible_texts
from unirl.runtime.engine_host.process import EngineProcess, EngineRaised

from .config import VllmConfig
from .environment import check_version
from .settings import checkpoint_folder, dtype_of, llm_arguments, program, sampling_arguments
from .transfer import Held, adapter_mismatch, files_of, full_mismatch, inventory

__all__ = ["VllmEngine", "build"]

UNSYNCED = -1
"""Version of an engine that holds the weights of its checkpoint, which are those of no version that trained here."""
SHORT_S = 60.0
"""Longest time for what takes no work."""


def build(config: VllmConfig, *, model: Model, device: Any) -> VllmEngine:
    """Start vLLM with the checkpoint that `model` was loaded from.

    Raises RecipeError for a setting that cannot be, and RunFailed when the environment is missing or of another
    version of vLLM, or when vLLM does not start.
    """
    return VllmEngine(config, model=model, device=torch.device(device))


class VllmEngine:
    """A `unirl.core.roles.Engine`. Calls may come from any thread, one at a time."""

    def __init__(self, config: VllmConfig, *, model: Model, device: torch.device) -> None:
        self.version = UNSYNCED
        self._config = config
        self._model = model
        self._lock = threading.RLock()
        self._arguments = llm_arguments(
            config, folder=checkpoint_folder(config, model), dtype=dtype_of(config, model), on_cpu=device.type == "cpu"
        )
        self._process = EngineProcess(program(config, device))
        self._held: dict[str, Held] = {}
        self._max_model_len = 0
        self._unusable = ""
        """Why nothing can be generated until a full sync; empty when it can."""
        self._has_other_base = False
        """Whether the weights of the checkpoint were replaced."""
        self._is_asleep = False
        self._is_closed = False
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def generate(self, request: Request) -> Rollout:
        """Every text track of the request.

        A row's text depends on its seed alone, up to the rounding of logits at another batch size.
        Raises RecipeError for tracks that the model does not have, for prompts with media, and for texts that may get
        longer than vLLM takes; RunFailed when vLLM died, took too long, or holds no usable weights.
        """
        with self._lock:
            self._check(request)
            if self._is_asleep:
                raise RunFailed("engine 'vllm' is asleep and cannot generate; wake it first.")
            if self._unusable:
                raise RunFailed(f"engine 'vllm' cannot generate: {self._unusable} Send it full weights.")
            return Rollout(tracks={name: self._text(request, name) for name in request.tracks})

    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Take full weights or an adapter. vLLM compares what it then computes with, bit for bit, with what came.

        Raises EchoMismatch for an update that does not fit, before anything changes; RunFailed when vLLM fails in it,
        after which nothing is generated until full weights have come, which start a dead vLLM again.
        """
        with self._lock:
            if self._is_closed:
                raise RunFailed(f"weights: version {update.version} was sent to engine 'vllm', which was closed.")
            if update.kind != "lora" and not self._process.is_running:
                self._process.close()
                self._start()
            self._refuse_unfit(update)
            self._unusable = f"the sync of version {update.version} did not come to its end."
            with files_of(update, folder=self._config.transfer_dir) as paths:
                asked = {
                    "kind": "lora" if update.kind == "lora" else "full",
                    "paths": paths,
                    "checksum": update.checksum,
                    "scale": update.adapter_scale,
                }
                self._has_other_base = self._has_other_base or update.kind != "lora"
                try:
                    self._process.call("load_weights", asked, timeout_s=self._config.sync_timeout_s)
                except EngineRaised as error:
                    if error.raised == "ValueError":
                        # Raised before anything was written.
                        self._unusable = ""
                        raise EchoMismatch(
                            f"weights: {update.kind} of version {update.version}: {error.text}"
                        ) from error
                    # Layers of two versions: only a start from scratch is sure.
                    self._process.close()
                    raise
            self._unusable = ""
            self.version = update.version
            return WeightReceipt(
                version=update.version,
                checksum=update.checksum,
                num_tensors=len(update.tensors),
                size_bytes=sum(tensor.numel() * tensor.element_size() for tensor in update.tensors.values()),
            )

    def sleep(self) -> None:
        """With `sleep_mode`, give the GPU's memory back, the weights kept in the host's. Asleep, nothing is made."""
        with self._lock:
            if self._config.sleep_mode and not self._is_asleep:
                self._process.call("sleep", timeout_s=self._config.sync_timeout_s)
            self._is_asleep = True

    def wake(self) -> None:
        with self._lock:
            if self._config.sleep_mode and self._is_asleep:
                self._process.call("wake", timeout_s=self._config.sync_timeout_s)
            self._is_asleep = False

    def close(self) -> None:
        """End vLLM and every process of it. May be called again, also while another thread generates."""
        self._is_closed = True
        self._process.close()

    def _start(self) -> None:
        self._process.start()
        version, _ = self._process.call("version", timeout_s=SHORT_S)
        check_version(version)
        found, _ = self._process.call("load", self._arguments, timeout_s=self._config.start_timeout_s)
        self._held, self._max_model_len = inventory(found["weights"]), int(found["max_model_len"])
        self._refuse_other_names()
        self.version, self._has_other_base, self._is_asleep = UNSYNCED, False, False

    def _refuse_other_names(self) -> None:
        """At the start rather than at the first sync: a model whose weights vLLM holds under other names."""
        # An adapter stands beside the layer that it is for, whose own weight then lies one name deeper.
        trains = {name.replace(".base_layer.", ".") for name, _ in self._model.trainable.named_parameters()}
        unknown = sorted(name for name in trains - self._held.keys() if ".lora_" not in name)
        if unknown:
            raise RecipeError(
                f"engine: vLLM does not hold {len(unknown)} of the weights of model {self._model.spec.name!r} by the "
                f"names that they train under, such as {unknown[0]!r}, so they could not be sent. Experts of a mixture "
                "are held in another form; take a dense model, or engine=trainside."
            )

    def _refuse_unfit(self, update: WeightUpdate) -> None:
        what = f"weights: {update.kind} of version {update.version}"
        if self._is_asleep:
            raise RunFailed(f"{what}: engine 'vllm' is asleep and takes none; wake it first.")
        if update.kind != "lora":
            mismatch = full_mismatch(update, self._held, rounds=self._config.dtype != "auto")
            if mismatch and not full_mismatch(update, self._held, rounds=True):
                mismatch += " Or name engine.dtype: weights in fp32 are then rounded to it."
        elif not self._config.lora_rank:
            rank = next(iter(update.tensors.values())).shape[0]
            raise RecipeError(
                f"{what}: engine 'vllm' was started without room for adapters; set engine.lora_rank={rank}."
            )
        elif self._unusable and self._has_other_base:
            raise RunFailed(f"{what}: an adapter cannot repair what {self._unusable} Send full weights.")
        else:
            mismatch = adapter_mismatch(update, self._held, most_rank=self._config.lora_rank)
        if mismatch:
            raise EchoMismatch(f"{what}: {mismatch}")

    def _check(self, request: Request) -> None:
        known = self._model.spec.tracks
        for name, wanted in request.tracks.items():
            if not isinstance(wanted, TextRequest) or known.get(name) != "text":
                raise RecipeError(
                    f"sampling: track {name!r} was asked for; engine 'vllm' generates text, and model "
                    f"{self._model.spec.name!r} has {', '.join(f'{track} ({kind})' for track, kind in known.items())}."
                )
            longest = max((len(prompt) for prompt in wanted.prompt_tokens), default=0) + wanted.sampling.max_new_tokens
            if longest > self._max_model_len:
                raise RecipeError(
                    f"sampling.max_new_tokens: a prompt with its text may get {longest} tokens long; vLLM takes "
                    f"{self._max_model_len} (engine.max_model_len). Lower one or raise the other."
                )
        for prompt_id, media in zip(request.prompt_ids, request.media, strict=True):
            if media:
                raise RecipeError(
                    f"data: prompt {prompt_id!r} has media ({media[0].uri}); engine 'vllm' takes text only."
                )

    def _text(self, request: Request, name: str) -> Track:
        wanted = request.text(name)
        asked = {"sampling": sampling_arguments(wanted), "seeds": list(wanted.seeds)}
        prompts = [prompt.to("cpu", torch.int64) for prompt in wanted.prompt_tokens]
        tensors = {"prompts": torch.cat(prompts), "prompt_lengths": torch.tensor([len(row) for row in prompts])}
        try:
            answer, found = self._process.call(
                "generate", asked, tensors=tensors, timeout_s=self._config.generate_timeout_s
            )
        except RunFailed:
            if not self._process.is_running:
                self._unusable = "its process ended while it generated."
            raise
        lengths = found["lengths"].tolist()
        reasons: list[str] = answer["finish_reasons"]
        if len(lengths) != request.num_rows or not {"stop", "length"}.issuperset(reasons):
            raise RunFailed(
                f"engine 'vllm': {request.num_rows} texts were asked for; {len(lengths)} came back, ended by "
                f"{sorted(set(reasons))}. Texts end by `stop` or by `length`."
            )
        generated = GeneratedText(
            tokens=tuple(found["tokens"].split(lengths)),
            log_probs=tuple(found["log_probs"].split(lengths)),
            truncated=tuple(reason == "length" for reason in reasons),
        )
        texts = visible_texts(cast("TextModel", self._model), generated.tokens, wanted.sampling)
        track = text_track(request, name, generated=generated, texts=texts, version=self.version)
        if wanted.sampling.top_p < 1 or wanted.sampling.top_k:
            # vLLM's are those of the tokens that were left, not of all.
            return dataclasses.replace(track, segment=dataclasses.replace(track.text, log_probs=None))
        return track
