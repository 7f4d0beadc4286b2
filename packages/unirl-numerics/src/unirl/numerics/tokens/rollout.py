"""Generation of a text track with a key-value cache, in process and in the processes of engines that run it there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from unirl.core.errors import RunFailed
from unirl.core.types.inputs import Inputs, distinct
from unirl.core.types.media import Media
from unirl.core.types.request import Request
from unirl.core.types.track import Conditions, Status, TextSegment, Track

from ..not_finite import first_not_finite
from .draws import BLOCK, TokenSampler, draws
from .restricted import RuledModel, allowed_tokens, narrowed_logits

if TYPE_CHECKING:
    from unirl.core.roles import TextModel
    from unirl.core.types.array import Ragged
    from unirl.core.types.request import TextRequest
    from unirl.core.types.sampling import TextSamplingConfig

__all__ = [
    "GeneratedText",
    "TokenDecoder",
    "completion_media",
    "generate_text",
    "text_conditions",
    "text_track",
    "visible_texts",
]

_TAIL = 32
"""Number of last tokens decoded to look for a stop string, however long the completion."""
_SHRINK = 0.25
"""Fraction of finished rows that triggers their removal from the KV cache, which copies it."""


class TokenDecoder(RuledModel, Protocol):
    """The part of a `TextModel` that `generate_text` uses; an engine may have its own."""

    @property
    def device(self) -> Any: ...

    @property
    def trainable(self) -> Any:
        """The module that computes logits, for the error about some that are not finite."""
        ...

    @property
    def pad_token(self) -> int: ...

    def texts(self, tokens: Sequence[Tensor]) -> list[str]: ...

    def next_logits(
        self, tokens: Tensor, *, positions: Tensor, attention_mask: Tensor, cache: Any
    ) -> tuple[Tensor, Any]: ...

    def select_cache(self, cache: Any, rows: Tensor) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class GeneratedText:
    """Completions of some rows of a request, and the settings they were sampled with."""

    prompt_tokens: tuple[Tensor, ...]
    """Per row [P_n] int64 on the CPU, as passed to the model."""
    temperature: float
    """Sampling temperature; 0 is greedy decoding."""
    tokens: tuple[Tensor, ...]
    """Per row [L_n] int64 on the CPU, including the stop token."""
    log_probs: tuple[Tensor, ...]
    """Per row [L_n] fp32 on the CPU, under softmax(logits / temperature) over all tokens, or those allowed; at
    temperature 0 under softmax(logits)."""
    truncated: tuple[bool, ...]
    """Cut off by the length limit."""
    options: tuple[tuple[str, Any], ...] = ()
    """Options that the logits were computed with, see `TextRequest`."""
    mask: tuple[Tensor, ...] | None = None
    """Per row [L_n] bool: False where the token was forced or otherwise not sampled; None if all were."""

    @classmethod
    def concat(cls, parts: Sequence[GeneratedText]) -> GeneratedText:
        (temperature,) = {part.temperature for part in parts}
        options, masks = parts[0].options, [part.mask for part in parts]
        assert all(part.options == options for part in parts), "parts of one request have the same options"
        return cls(
            prompt_tokens=tuple(row for part in parts for row in part.prompt_tokens),
            temperature=temperature,
            tokens=tuple(row for part in parts for row in part.tokens),
            log_probs=tuple(row for part in parts for row in part.log_probs),
            truncated=tuple(row for part in parts for row in part.truncated),
            options=options,
            mask=None if masks[0] is None else tuple(row for mask in masks for row in mask or ()),
        )


@torch.no_grad()
def generate_text(
    model: TokenDecoder,
    wanted: TextRequest,
    *,
    conditions: Conditions | None = None,
    anyone: Callable[[bool], bool] = bool,
) -> GeneratedText:
    """Generate from every prompt of `wanted` until a stop token, a stop string or the length limit; or the number of
    tokens that the model fixes.

    conditions: of each row, for a `TextModel`.
    Each distinct prompt is prefilled once, whatever its number of samples: prompts of equal tokens and other conditions
    are different prompts. The draws of a row depend on its seed, so
    they are the same in any split of the request; logits differ only by the rounding of a forward at another batch
    size.
    Raises RunFailed, with the first layer whose output is not finite, when logits are not.
    anyone: takes whether rows are unfinished here, returns whether the model must run again. Ranks of a sharded model
    step until all have finished; by default only this process counts.
    """
    sampling = wanted.sampling
    options = dict(wanted.options)
    further = {"options": options} if options else {}
    rows = _Rows(wanted, is_restricted=bool(model.spec.restricts))
    sampler = TokenSampler(temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k)
    prompts, mask, index, first = _distinct(model, wanted.prompt_tokens, conditions)
    logits, cache, positions = _prefill(
        model, prompts, mask, {} if conditions is None else conditions.select(first).expanded(), **further
    )
    read = [row[is_token].cpu() for row, is_token in zip(prompts, mask, strict=True)]
    logits, cache = logits[index], model.select_cache(cache, index)
    positions, mask = positions[index], mask[index]
    alive = torch.arange(wanted.num_rows)
    longest = sampling.max_new_tokens if wanted.length is None else wanted.length
    for step in range(longest):
        uniform = rows.uniform(alive, step)
        allowed = rows.allowed(alive, model, options)
        if any(ids is not None for ids in allowed):
            logits = narrowed_logits(logits, allowed, model=model.spec.name)
        tokens, log_probs = sampler.choose(logits, uniform)
        chosen = log_probs.float().cpu()
        if not bool(chosen.isfinite().all()):
            row = int(alive[int((~chosen.isfinite()).nonzero()[0])])
            text = torch.cat([wanted.prompt_tokens[row], rows.so_far(row)])[None].to(model.device)
            own = {} if conditions is None else conditions.select([row]).expanded()
            raise _not_finite(model, text, own, **further)
        forced = torch.tensor([ids is not None and len(ids) == 1 for ids in allowed])
        goes_on = rows.add(alive, tokens.cpu(), chosen, forced, model)
        is_last = step + 1 == longest
        if not anyone(bool(goes_on.any()) and not is_last):
            break
        if (~goes_on).float().mean() >= _SHRINK and bool(goes_on.any()):
            kept = goes_on.nonzero().squeeze(1)
            there = kept.to(tokens.device)
            alive, tokens, positions, mask = alive[kept], tokens[there], positions[there], mask[there]
            cache = model.select_cache(cache, there)
        positions = positions + 1
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        logits, cache = model.next_logits(
            tokens[:, None], positions=positions[:, None], attention_mask=mask, cache=cache, **further
        )
    return rows.found(
        prompt_tokens=[read[at] for at in cast("list[int]", cast("Any", index).tolist())],
        temperature=sampler.temperature,
        options=options,
    )


def text_conditions(model: TextModel, inputs: Inputs, *, sampling: TextSamplingConfig) -> Conditions | None:
    """Conditions of these inputs besides their tokens; None for a model that reads no media."""
    if not model.spec.reads_media("text"):
        return None
    rows, index = distinct(inputs)
    values = model.conditions(inputs.select(rows), sampling=sampling)
    return Conditions(values=values, index=torch.tensor(index)).to(model.device)


def text_track(
    request: Request,
    *,
    generated: GeneratedText,
    media: Media,
    version: int,
    conditions: Conditions | None = None,
) -> Track:
    """The track of a whole request. The request supplies its name and the identity of its rows: ids, group, inputs,
    metadata. The settings used are in `generated`.

    media: the input of rewards, see `completion_media`.  version: of the policy that generated the samples.
    conditions: that they were generated with, for training to replay them.
    """
    return Track(
        name=request.track,
        sample_ids=request.sample_ids,
        group_ids=request.group_ids,
        parent_ids=request.inputs.ids,
        inputs=request.inputs,
        metadata=request.metadata,
        conditions={} if conditions is None else {"positive": conditions},
        segment=TextSegment(
            prompt_tokens=generated.prompt_tokens,
            tokens=generated.tokens,
            log_probs=generated.log_probs,
            temperature=generated.temperature,
            options=generated.options,
            mask=generated.mask,
        ),
        media=media,
        sample_weights=torch.ones(request.num_rows),
        status=tuple(Status.TRUNCATED if cut else Status.COMPLETED for cut in generated.truncated),
        policy_version=(version,) * request.num_rows,
    )


def completion_media(model: TextModel, tokens: Sequence[Tensor], request: Request) -> Media:
    """What completions become: texts, see `visible_texts`, or what the model makes of its tokens.

    Raises RunFailed for a model that makes another medium than the request's, or another number.
    """
    sampling = request.text.sampling
    if request.medium in (None, "text"):
        return Media(kind="text", values=tuple(visible_texts(model, tokens, sampling)))
    with torch.no_grad():
        media = model.media_of(tokens, sampling=sampling)
    if media.kind != request.medium or media.num_rows != len(tokens):
        raise RunFailed(
            f"model {model.spec.name!r}: media_of() gave {media.num_rows} {media.kind} of {len(tokens)} completions; "
            f"its spec states {request.medium}."
        )
    return media


def visible_texts(model: TextModel, tokens: Sequence[Tensor], sampling: TextSamplingConfig) -> list[str]:
    """The completions without special tokens and without the final stop string."""
    return [_cut(text, sampling.stop) for text in model.texts(tokens)]


def _cut(text: str, stops: Sequence[str]) -> str:
    ends = [text.find(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text


def _distinct(
    model: TokenDecoder, prompts: Sequence[Tensor], conditions: Conditions | None
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Each distinct prompt once, padded on the left: tokens [U, P], mask [U, P]; each row's prompt index [N]; and the
    first row of each prompt."""
    inputs = [0] * len(prompts) if conditions is None else cast("list[int]", cast("Any", conditions.index).tolist())
    keys = [(at, *cast("Any", prompt).tolist()) for at, prompt in zip(inputs, prompts, strict=True)]
    distinct = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    longest = max(len(key) for key in distinct) - 1
    tokens = torch.full((len(distinct), longest), model.pad_token, dtype=torch.int64)
    mask = torch.zeros((len(distinct), longest), dtype=torch.bool)
    for (_, *key), row in distinct.items():
        tokens[row, longest - len(key) :] = torch.tensor(key)
        mask[row, longest - len(key) :] = True
    index = torch.tensor([distinct[key] for key in keys], device=model.device)
    first = [keys.index(key) for key in distinct]
    return tokens.to(model.device), mask.to(model.device), index, first


def _prefill(
    model: TokenDecoder, tokens: Tensor, mask: Tensor, conditions: Mapping[str, Ragged], **further: Any
) -> tuple[Tensor, Any, Tensor]:
    """Logits [U, V] after prompts padded on the left, KV cache, last positions [U]."""
    positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
    settings: dict[str, Any] = {"positions": positions, "attention_mask": mask, "cache": None, **further}
    if conditions:
        settings["conditions"] = conditions
    logits, cache = model.next_logits(tokens, **settings)
    return logits, cache, positions[:, -1]


def _not_finite(model: TokenDecoder, text: Tensor, conditions: Mapping[str, Ragged], **further: Any) -> RunFailed:
    """The error for logits that are not finite after `text` [1, L], with the layer that gives them."""
    why = first_not_finite(
        model.trainable, lambda: _prefill(model, text, torch.ones_like(text, dtype=torch.bool), conditions, **further)
    )
    return RunFailed(f"model {model.spec.name!r}: logits are not finite{why}")


class _Rows:
    """Growing completions, by row of the request. Unfinished rows all have the same length, the number of steps."""

    def __init__(self, wanted: TextRequest, *, is_restricted: bool) -> None:
        self._stop_tokens = torch.tensor(wanted.stop_tokens, dtype=torch.int64)
        self._stops = wanted.sampling.stop
        self._has_fixed_length = wanted.length is not None
        self._num_steps = 0
        self._tokens = torch.zeros((wanted.num_rows, BLOCK), dtype=torch.int64)
        self._log_probs = torch.zeros((wanted.num_rows, BLOCK))
        self._mask = torch.ones((wanted.num_rows, BLOCK), dtype=torch.bool) if is_restricted else None
        self._lengths = torch.zeros(wanted.num_rows, dtype=torch.int64)
        self._ended = torch.zeros(wanted.num_rows, dtype=torch.bool)
        self._seeds = wanted.seeds
        self._drawn = np.empty((wanted.num_rows, 0))

    def uniform(self, rows: Tensor, step: int) -> Tensor:
        """[B] fp64: number `step` of the stream of each row's seed."""
        if step >= self._drawn.shape[1]:
            more = np.stack([draws(seed, step // BLOCK) for seed in self._seeds])
            self._drawn = np.concatenate([self._drawn, more], axis=1)
        return torch.from_numpy(self._drawn[rows.numpy(), step])  # pyright: ignore[reportUnknownMemberType]

    def so_far(self, row: int) -> Tensor:
        """Tokens [S] of an unfinished row."""
        return self._tokens[row, : self._num_steps]

    def allowed(self, rows: Tensor, model: TokenDecoder, options: Mapping[str, Any]) -> list[Tensor | None]:
        """Ids that the next token of each row may have; None for all of them, and for finished rows."""
        if self._mask is None:
            return [None] * len(rows)
        numbers: list[int] = cast("Any", rows).tolist()
        return [
            None
            if bool(self._ended[row])
            else allowed_tokens(model, self.so_far(row).clone(), options=options).get(self._num_steps)
            for row in numbers
        ]

    def add(self, rows: Tensor, tokens: Tensor, log_probs: Tensor, forced: Tensor, model: TokenDecoder) -> Tensor:
        """[B] bool: rows unfinished after these tokens. Finished rows take no more tokens. forced: [B] bool."""
        place = self._num_steps
        if place == self._tokens.shape[1]:
            self._tokens = torch.cat([self._tokens, torch.zeros_like(self._tokens)], dim=1)
            self._log_probs = torch.cat([self._log_probs, torch.zeros_like(self._log_probs)], dim=1)
            if self._mask is not None:
                self._mask = torch.cat([self._mask, torch.ones_like(self._mask)], dim=1)
        taking = ~self._ended[rows]
        going, taken = rows[taking], tokens[taking]
        self._tokens[going, place] = taken
        self._log_probs[going, place] = log_probs[taking]
        if self._mask is not None:
            self._mask[going, place] = ~forced[taking]
        self._lengths[going] += 1
        self._num_steps += 1
        self._ended[going] = torch.isin(taken, self._stop_tokens) | self._have_stop(going, model)
        return ~self._ended[rows]

    def found(
        self, *, prompt_tokens: Sequence[Tensor], temperature: float, options: Mapping[str, Any]
    ) -> GeneratedText:
        lengths: list[int] = cast("Any", self._lengths).tolist()
        return GeneratedText(
            prompt_tokens=tuple(prompt_tokens),
            temperature=temperature,
            tokens=_split(self._tokens, lengths),
            log_probs=_split(self._log_probs, lengths),
            truncated=tuple(
                not ended for ended in cast("list[bool]", cast("Any", self._ended | self._has_fixed_length).tolist())
            ),
            options=tuple(options.items()),
            mask=None if self._mask is None else _split(self._mask, lengths),
        )

    def _have_stop(self, rows: Tensor, model: TokenDecoder) -> Tensor:
        """[B] bool: rows whose completion contains a stop string."""
        if not self._stops:
            return torch.zeros(len(rows), dtype=torch.bool)
        tails = self._tokens[rows, max(0, self._num_steps - _TAIL) : self._num_steps]
        texts = model.texts(list(tails))
        return torch.tensor([any(stop in text for stop in self._stops) for text in texts], dtype=torch.bool)


def _split(values: Tensor, lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """[N, S] -> per row [L_n], each with separate memory."""
    return tuple(row[:length].clone() for row, length in zip(values, lengths, strict=True))
