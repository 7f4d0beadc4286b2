"""A text track of a request, generated in this process with a key-value cache: what every in-process engine shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor
from unirl.core.request import Request
from unirl.core.track import Status, TextSegment, Track

from .token_draws import BLOCK, choose_tokens, draws

if TYPE_CHECKING:
    from unirl.core.config import TextSamplingConfig
    from unirl.core.request import TextRequest
    from unirl.core.roles import TextModel

__all__ = ["GeneratedText", "generate_text", "text_track", "visible_texts"]

_TAIL = 32
"""Tokens that are decoded to look for a stop string: it lies in the last of them, however long the text."""
_SHRINK = 0.25
"""Share of rows that must have ended before their places in the cache are given up, which copies it."""


@dataclass(frozen=True, kw_only=True)
class GeneratedText:
    """What some rows of a request became."""

    tokens: tuple[Tensor, ...]
    """Per row [L_n] int64 on the CPU, the token that ended it included."""
    log_probs: tuple[Tensor, ...]
    """Per row [L_n] fp32 on the CPU, under softmax(logits / temperature) over all tokens; at temperature 0 under
    softmax(logits)."""
    truncated: tuple[bool, ...]
    """The length limit came before an end."""

    @classmethod
    def concat(cls, parts: Sequence[GeneratedText]) -> GeneratedText:
        return cls(
            tokens=tuple(row for part in parts for row in part.tokens),
            log_probs=tuple(row for part in parts for row in part.log_probs),
            truncated=tuple(row for part in parts for row in part.truncated),
        )


@torch.no_grad()
def generate_text(
    model: TextModel,
    wanted: TextRequest,
    *,
    anyone: Callable[[bool], bool] = bool,
) -> GeneratedText:
    """Go on from every prompt of `wanted` until a stop token, a stop string or the length limit.

    Each distinct prompt runs through the model once, whatever number of samples go on from it. The draws of a row are
    those of its seed, so no split of the request changes them; logits differ by the rounding of a forward at another
    batch size alone.
    anyone: told whether rows here go on, says whether the model must run again. Ranks that share a sharded model step
    until all have ended; the default asks nobody else.
    """
    sampling = wanted.sampling
    rows = _Rows(wanted)
    logits, cache, positions, mask, index = _prefill(model, wanted.prompt_tokens)
    logits, cache = logits[index], model.select_cache(cache, index)
    positions, mask = positions[index], mask[index]
    alive = torch.arange(wanted.num_rows)
    for step in range(sampling.max_new_tokens):
        uniform = rows.uniform(alive, step)
        tokens, log_probs = choose_tokens(
            logits, uniform, temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k
        )
        goes_on = rows.add(alive, tokens.cpu(), log_probs.float().cpu(), model)
        is_last = step + 1 == sampling.max_new_tokens
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
            tokens[:, None], positions=positions[:, None], attention_mask=mask, cache=cache
        )
    return rows.found()


def text_track(request: Request, name: str, *, generated: GeneratedText, texts: Sequence[str], version: int) -> Track:
    """The track of a whole request: its lineage, its segment, and the echo of what was used.

    texts: what rewards see, see `visible_texts`.  version: of the policy that the samples were made with.
    """
    wanted = request.text(name)
    return Track(
        name=name,
        sample_ids=request.sample_ids,
        group_ids=request.group_ids,
        parent_ids=request.prompt_ids,
        prompts=request.prompts,
        metadata=request.metadata,
        segment=TextSegment(
            prompt_tokens=wanted.prompt_tokens,
            tokens=generated.tokens,
            log_probs=generated.log_probs,
            temperature=wanted.sampling.temperature,
        ),
        texts=tuple(texts),
        weights=torch.ones(request.num_rows),
        status=tuple(Status.TRUNCATED if cut else Status.COMPLETED for cut in generated.truncated),
        policy_version=(version,) * request.num_rows,
    )


def visible_texts(model: TextModel, tokens: Sequence[Tensor], sampling: TextSamplingConfig) -> list[str]:
    """The texts without special tokens, and without the stop string that ended them."""
    return [_cut(text, sampling.stop) for text in model.texts(tokens)]


def _cut(text: str, stops: Sequence[str]) -> str:
    ends = [text.find(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text


def _prefill(model: TextModel, prompts: Sequence[Tensor]) -> tuple[Tensor, Any, Tensor, Tensor, Tensor]:
    """Each distinct prompt once: logits [U, V], cache, last positions [U], mask [U, P]; and the prompt [N] of a row."""
    keys = [tuple(cast("Any", prompt).tolist()) for prompt in prompts]
    distinct = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    longest = max(len(key) for key in distinct)
    tokens = torch.full((len(distinct), longest), model.pad_token, dtype=torch.int64)
    mask = torch.zeros((len(distinct), longest), dtype=torch.bool)
    for key, row in distinct.items():
        tokens[row, longest - len(key) :] = torch.tensor(key)
        mask[row, longest - len(key) :] = True
    tokens, mask = tokens.to(model.device), mask.to(model.device)
    positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
    logits, cache = model.next_logits(tokens, positions=positions, attention_mask=mask, cache=None)
    index = torch.tensor([distinct[key] for key in keys], device=model.device)
    return logits, cache, positions[:, -1], mask, index


class _Rows:
    """The texts that grow, by row of the request. Rows that go on are all of one length, the number of steps."""

    def __init__(self, wanted: TextRequest) -> None:
        self._stop_tokens = torch.tensor(wanted.stop_tokens, dtype=torch.int64)
        self._stops = wanted.sampling.stop
        self._num_steps = 0
        self._tokens = torch.zeros((wanted.num_rows, BLOCK), dtype=torch.int64)
        self._log_probs = torch.zeros((wanted.num_rows, BLOCK))
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

    def add(self, rows: Tensor, tokens: Tensor, log_probs: Tensor, model: TextModel) -> Tensor:
        """[B] bool: which rows go on after these tokens. Those that had ended take none and stay so."""
        place = self._num_steps
        if place == self._tokens.shape[1]:
            self._tokens = torch.cat([self._tokens, torch.zeros_like(self._tokens)], dim=1)
            self._log_probs = torch.cat([self._log_probs, torch.zeros_like(self._log_probs)], dim=1)
        taking = ~self._ended[rows]
        going, taken = rows[taking], tokens[taking]
        self._tokens[going, place] = taken
        self._log_probs[going, place] = log_probs[taking]
        self._lengths[going] += 1
        self._num_steps += 1
        self._ended[going] = torch.isin(taken, self._stop_tokens) | self._have_stop(going, model)
        return ~self._ended[rows]

    def found(self) -> GeneratedText:
        lengths = [int(length) for length in self._lengths]
        return GeneratedText(
            tokens=_split(self._tokens, lengths),
            log_probs=_split(self._log_probs, lengths),
            truncated=tuple(not bool(ended) for ended in self._ended),
        )

    def _have_stop(self, rows: Tensor, model: TextModel) -> Tensor:
        """[B] bool: rows whose text has a stop string by now."""
        if not self._stops:
            return torch.zeros(len(rows), dtype=torch.bool)
        tails = self._tokens[rows, max(0, self._num_steps - _TAIL) : self._num_steps]
        texts = model.texts(list(tails))
        return torch.tensor([any(stop in text for stop in self._stops) for text in texts], dtype=torch.bool)


def _split(values: Tensor, lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """[N, S] -> per row [L_n], each with memory of its own."""
    return tuple(row[:length].clone() for row, length in zip(values, lengths, strict=True))
