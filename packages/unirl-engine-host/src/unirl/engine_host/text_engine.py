"""External engine for text: sends prompts as tokens, with the tensors of their images where the model reads any, and
receives completions with the sampling policy's log-probs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from unirl.core.errors import DataError, RecipeError, RunFailed
from unirl.core.roles import TextModel
from unirl.core.types.inputs import Inputs
from unirl.core.types.request import Request, TextRequest
from unirl.core.types.sampling import TextSamplingConfig
from unirl.core.types.track import Conditions, Track
from unirl.core.types.weights import checksum
from unirl.engine_host.text_config import ExternalTextConfig

from .external import ExternalEngine, Hosting
from .process import Program
from .program import Product

__all__ = ["CPU_CACHE_MB", "ExternalTextEngine", "ExternalTexts", "ToConditions", "ToTrack"]

Generate: TypeAlias = Callable[[Mapping[str, Any], Mapping[str, Tensor]], tuple[Any, dict[str, Any]]]
"""The call `generate` of a program."""

CPU_CACHE_MB = 1024
"""Size of the KV cache on a CPU when `engine.kv_cache_mb` is 0."""


class ToConditions(Protocol):
    """`unirl.numerics.tokens.rollout.text_conditions`, which this package does not import."""

    def __call__(self, model: TextModel, inputs: Inputs, *, sampling: TextSamplingConfig) -> Conditions | None: ...


class ToTrack(Protocol):
    """`unirl.engine_host.received_text.received_track`, which this package does not import."""

    def __call__(
        self,
        request: Request,
        *,
        model: TextModel,
        prompt_tokens: Sequence[Tensor],
        temperature: float,
        tokens: Sequence[Tensor],
        log_probs: Sequence[Tensor] | None,
        truncated: Sequence[bool],
        version: int,
        conditions: Conditions | None,
        mask: Sequence[Tensor] | None,
        options: Mapping[str, Any],
    ) -> Track: ...


class ExternalTexts:
    """The text half of an external engine: how it is asked, and what is made of its answer.

    Its program answers `load` with the context length as `max_model_len`, and `generate` with the result of
    `received.generated`.
    """

    def __init__(
        self,
        product: Product,
        *,
        model: TextModel,
        sampling: Callable[[TextRequest], Mapping[str, Any]],
        conditions: ToConditions,
        track: ToTrack,
        limit: str = "engine.max_model_len",
    ) -> None:
        """sampling: a request's settings as arguments of `generate`.  limit: name of what limits the context length."""
        self._product, self._model, self._limit = product, model, limit
        self._sampling = sampling
        self._conditions, self._track = conditions, track
        self._max_model_len = 0

    def started(self, found: Mapping[str, Any]) -> None:
        """Takes the result of `load`."""
        self._max_model_len = int(found["max_model_len"])

    def check(self, wanted: TextRequest) -> None:
        """Raise RecipeError for completions that may exceed the engine's context length."""
        longest = max((len(prompt) for prompt in wanted.prompt_tokens), default=0) + wanted.sampling.max_new_tokens
        if longest > self._max_model_len:
            raise RecipeError(
                f"sampling.max_new_tokens: prompt plus completion may reach {longest} tokens; {self._product.title} "
                f"takes {self._max_model_len} ({self._limit}). Lower max_new_tokens or raise the limit."
            )

    def track(self, request: Request, *, generate: Generate, version: int) -> Track:
        """The text track of the request. generate: calls the program.  version: of the weights that it was sent.

        Raises DataError for media that cannot be read, before anything is sent, and RunFailed for an answer of other
        rows, media or weights.
        """
        expected, name = request.text, f"engine {self._product.name!r}"
        prompts = [prompt.to("cpu", torch.int64) for prompt in expected.prompt_tokens]
        conditions = self._conditions(self._model, request.inputs, sampling=expected.sampling)
        media, tensors = _media(conditions, num_rows=request.num_rows)
        self._refuse_media(request, media)
        asked = {"sampling": self._sampling(expected), "seeds": list(expected.seeds), "media": media}
        tensors |= {"prompts": torch.cat(prompts), "prompt_lengths": torch.tensor([len(row) for row in prompts])}
        answer, result = generate(asked, tensors)
        lengths = result["lengths"].tolist()
        reasons: list[str] = answer["finish_reasons"]
        temperatures = sorted(set(answer["temperatures"]))
        if len(lengths) != request.num_rows or not {"stop", "length"}.issuperset(reasons):
            raise RunFailed(
                f"{name}: got {len(lengths)} completions with finish reasons {sorted(set(reasons))}, expected "
                f"{request.num_rows} with `stop` or `length`."
            )
        if len(temperatures) > 1:
            raise RunFailed(f"{name}: one request was sampled at several temperatures: {temperatures}.")
        if other := [row for row, used in enumerate(answer["media"]) if used != media[row]]:
            raise RunFailed(f"{name}: the completion of row {other[0]} was generated from other media than its own.")
        if answer["version"] not in (None, version):
            raise RunFailed(
                f"{name}: got completions by weights of version {answer['version']}, expected version {version}, which "
                "was sent last."
            )
        is_cut = expected.sampling.top_p < 1 or bool(expected.sampling.top_k)
        says = self._product.says_cut_log_probs or not is_cut
        return self._track(
            request,
            model=self._model,
            prompt_tokens=result["prompts"].split(result["prompt_lengths"].tolist()),
            temperature=temperatures[0],
            tokens=result["tokens"].split(lengths),
            log_probs=result["log_probs"].split(lengths) if says else None,
            truncated=[reason == "length" for reason in reasons],
            version=version,
            conditions=conditions,
            mask=result["mask"].split(lengths) if "mask" in result else None,
            options=answer["options"],
        )

    def _refuse_media(self, request: Request, media: Sequence[str]) -> None:
        """Raise DataError for rows with media that the engine is given none of. media: key of each row's."""
        spec = self._model.spec
        shown = [name for name, key in zip(request.sample_ids, media, strict=True) if key]
        if shown and (why := spec.text_alone.get(self._product.name)):
            raise DataError(
                f"sample {shown[0]!r}, model {spec.name!r}: got images, of which engine {self._product.name!r} is "
                f"given none: {why}. Use engine=trainside."
            )


class ExternalTextEngine(ExternalEngine):
    """A `unirl.core.roles.Engine` that generates text."""

    def __init__(
        self,
        product: Product,
        config: ExternalTextConfig,
        *,
        model: TextModel,
        program: Program,
        arguments: Mapping[str, Any],
        sampling: Callable[[TextRequest], Mapping[str, Any]],
        conditions: ToConditions,
        track: ToTrack,
        leaves_out: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """Start the engine. arguments: of `load`.  leaves_out: as of `Hosting`.  The others: see `ExternalTexts`.

        Raises RecipeError for a model whose weight names the engine does not use, RunFailed if it does not start or has
        an untested version.
        """
        self._texts = ExternalTexts(product, model=model, sampling=sampling, conditions=conditions, track=track)
        hosting = Hosting.of(
            product,
            config,
            program=program,
            arguments=arguments,
            lora_rank=config.lora_rank,
            leaves_out=leaves_out,
        )
        super().__init__(hosting, model=model)

    def generate(self, request: Request) -> Track:
        """The text track of the request.

        A completion depends only on its prompt and seed, up to the rounding of logits at another batch size.
        Raises RecipeError for an unknown track and for completions that may exceed the engine's context length;
        DataError for media that cannot be read, before anything is sent; RunFailed when it died, timed out, or has no
        usable weights.
        """
        with self._lock:
            known, expected = self._model.spec.tracks, request.params
            if not isinstance(expected, TextRequest) or "text" not in known.values():
                raise RecipeError(
                    f"sampling: got track {request.track!r}, but {self._name} generates text, and model "
                    f"{self._model.spec.name!r} has {', '.join(f'{track} ({kind})' for track, kind in known.items())}."
                )
            self._texts.check(expected)
            self._refuse_idle()
            return self._texts.track(request, generate=self._generate, version=self.version)

    def _started(self, found: Mapping[str, Any]) -> None:
        self._texts.started(found)


def _media(conditions: Conditions | None, *, num_rows: int) -> tuple[list[str], dict[str, Tensor]]:
    """The key of each row's media, and their tensors as `received.rows` reads them. Keys are checksums of the tensors,
    so that an engine's caches by key never share between different media; empty without media, or with tensors that are
    all empty."""
    if conditions is None:
        return [""] * num_rows, {}
    values = conditions.to("cpu").values
    each = [dict(zip(values, one, strict=True)) for one in zip(*values.values(), strict=True)]
    keys = [checksum(one) if any(value.numel() for value in one.values()) else "" for one in each]
    shown = [(key, one) for key, one in zip(keys, each, strict=True) if key]
    tensors = {f"{key}/{name}": value for key, one in shown for name, value in one.items()}
    return [keys[number] for number in conditions.index.tolist()], tensors
