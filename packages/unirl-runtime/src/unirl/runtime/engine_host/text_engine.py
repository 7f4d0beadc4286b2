"""An engine for text in a process of its own: requests go there as tokens, texts come back with the log-probs of the
policy that sampled them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from unirl.core.errors import RecipeError, RunFailed
from unirl.core.hosted_text import HostedTextConfig
from unirl.core.request import Request, TextRequest
from unirl.core.roles import Model, TextModel
from unirl.core.rollout import Rollout
from unirl.core.track import Track

from .hosted import HostedEngine, Hosting
from .process import Program
from .program import Product

__all__ = ["CPU_CACHE_MB", "HostedTextEngine", "ToTrack"]

CPU_CACHE_MB = 1024
"""Of the key-value cache on a CPU, where `engine.kv_cache_mb` is 0."""


class ToTrack(Protocol):
    """`unirl.numerics.received_text.received_track`, which this package does not import."""

    def __call__(
        self,
        request: Request,
        name: str,
        *,
        model: TextModel,
        tokens: Sequence[Tensor],
        log_probs: Sequence[Tensor] | None,
        truncated: Sequence[bool],
        version: int,
    ) -> Track: ...


class HostedTextEngine(HostedEngine):
    """A `unirl.core.roles.Engine` that generates text.

    Besides what `HostedEngine` calls, its program answers `load` with the longest text as `max_model_len`, and
    `generate` with what `received.generated` makes.
    """

    def __init__(
        self,
        product: Product,
        config: HostedTextConfig,
        *,
        model: Model,
        program: Program,
        arguments: Mapping[str, Any],
        sampling: Callable[[TextRequest], Mapping[str, Any]],
        track: ToTrack,
    ) -> None:
        """Start it. arguments: of `load`.  sampling: what `generate` is told of a request, in the engine's words.

        Raises RecipeError for a model whose weights it does not hold by their names, RunFailed when it does not start
        or is of another version.
        """
        self._product = product
        self._sampling = sampling
        self._track = track
        self._max_model_len = 0
        hosting = Hosting.of(product, config, program=program, arguments=arguments, lora_rank=config.lora_rank)
        super().__init__(hosting, model=model)

    def generate(self, request: Request) -> Rollout:
        """Every text track of the request.

        A row's text depends on its seed alone, up to the rounding of logits at another batch size.
        Raises RecipeError for tracks that the model does not have, for prompts with media, and for texts that may get
        longer than the engine takes; RunFailed when it died, took too long, or holds no usable weights.
        """
        with self._lock:
            self._check(request)
            self._refuse_idle()
            return Rollout(tracks={name: self._text(request, name) for name in request.tracks})

    def _started(self, found: Mapping[str, Any]) -> None:
        self._max_model_len = int(found["max_model_len"])

    def _check(self, request: Request) -> None:
        known = self._model.spec.tracks
        for name, wanted in request.tracks.items():
            if not isinstance(wanted, TextRequest) or known.get(name) != "text":
                raise RecipeError(
                    f"sampling: track {name!r} was asked for; {self._name} generates text, and model "
                    f"{self._model.spec.name!r} has {', '.join(f'{track} ({kind})' for track, kind in known.items())}."
                )
            longest = max((len(prompt) for prompt in wanted.prompt_tokens), default=0) + wanted.sampling.max_new_tokens
            if longest > self._max_model_len:
                raise RecipeError(
                    f"sampling.max_new_tokens: a prompt with its text may get {longest} tokens long; "
                    f"{self._product.title} takes {self._max_model_len} (engine.max_model_len). Lower one or raise the "
                    "other."
                )
        for prompt_id, media in zip(request.prompt_ids, request.media, strict=True):
            if media:
                raise RecipeError(
                    f"data: prompt {prompt_id!r} has media ({media[0].uri}); {self._name} takes text only."
                )

    def _text(self, request: Request, name: str) -> Track:
        wanted = request.text(name)
        asked = {"sampling": self._sampling(wanted), "seeds": list(wanted.seeds)}
        prompts = [prompt.to("cpu", torch.int64) for prompt in wanted.prompt_tokens]
        tensors = {"prompts": torch.cat(prompts), "prompt_lengths": torch.tensor([len(row) for row in prompts])}
        answer, found = self._generate(asked, tensors)
        lengths = found["lengths"].tolist()
        reasons: list[str] = answer["finish_reasons"]
        if len(lengths) != request.num_rows or not {"stop", "length"}.issuperset(reasons):
            raise RunFailed(
                f"{self._name}: {request.num_rows} texts were asked for; {len(lengths)} came back, ended by "
                f"{sorted(set(reasons))}. Texts end by `stop` or by `length`."
            )
        is_cut = wanted.sampling.top_p < 1 or bool(wanted.sampling.top_k)
        says = self._product.says_cut_log_probs or not is_cut
        return self._track(
            request,
            name,
            model=cast("TextModel", self._model),
            tokens=found["tokens"].split(lengths),
            log_probs=found["log_probs"].split(lengths) if says else None,
            truncated=[reason == "length" for reason in reasons],
            version=self.version,
        )
