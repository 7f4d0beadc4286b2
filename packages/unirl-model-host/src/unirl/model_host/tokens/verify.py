"""Checks that a new architecture must pass before anything is trained with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from unirl.core.errors import RecipeError
from unirl.core.roles import TokenBatch
from unirl.numerics.not_finite import first_not_finite
from unirl.numerics.tokens.batches import pack_batch, pad_batch

from .causal_lm import CausalLmModel

__all__ = ["verify"]

_ERRORS = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
_TEXTS = ("The ring is red, is it not? Yes.", "2 + 3 = 5")
_CHOICES = ((1, 0, 1), (2, 1), (1, 0), (1,))
"""Rows of the cache that are kept after each step: repeated, as samples of a prompt are, reordered, and dropped."""


@torch.no_grad()
def verify(
    model: CausalLmModel,
    *,
    prompts: Sequence[Tensor] = (),
    conditions: Mapping[str, Sequence[Tensor]] | None = None,
) -> None:
    """Compare log-probs in a padded batch, packed where the model packs, and with a cache as a rollout uses it (padding
    on the left, rows that are repeated, reordered and dropped) with those of each text alone in the checkpoint's own
    forward.

    prompts, conditions: two of a model that reads media; else they are made of texts.
    Raises RecipeError, key `model.path`, with the difference, for a forward that does not take such batches, and for
    logits that are not finite.
    """
    name_of_class = type(model.causal_lm).__name__
    rows = [torch.tensor(model.tokenizer(text)["input_ids"], dtype=torch.int64) for text in _TEXTS]
    asked, answers = list(prompts) or [row[: len(row) // 2] for row in rows], [row[len(row) // 2 :] for row in rows]
    media = {name: tuple(each) for name, each in (conditions or {}).items()}
    own = [{name: each[row] for name, each in media.items()} for row in range(len(rows))]
    try:
        expected = [_alone(model, *one) for one in zip(asked, answers, own, strict=True)]
    except _ERRORS as error:
        raise RecipeError(
            f"model.path: {name_of_class!r} of transformers does not run on a text with the config and weights of this "
            f"checkpoint: {error}. Fetch it again, or choose another one."
        ) from error
    for one, row in zip(zip(asked, answers, own, strict=True), expected, strict=True):
        if not bool(row.isfinite().all()):
            why = first_not_finite(model.trainable, partial(_alone, model, *one))
            raise RecipeError(f"model.path: logits of {str(model.folder)!r} are not finite{why}")
    try:
        found, bound = _gaps(model, asked, answers, media, expected)
    except _ERRORS as error:
        raise RecipeError(
            f"model.path: {name_of_class!r} does not take padded batches and a cache as transformers' usual models do: "
            f"{error}. Choose another architecture, or write a model plugin."
        ) from error
    name, worst = max(found.items(), key=lambda item: item[1])
    if not worst <= bound:
        # Only flash attention packs.
        advice = "use model.attention=sdpa, " if name == "packed" else ""
        raise RecipeError(
            f"model.path: {name_of_class!r} gives log-probs that differ by {worst:.2g} in a {name} "
            f"batch from those of each text alone, expected at most {bound:.1g}. Its layers do not keep to masks, "
            f"positions and rows of a cache as transformers' usual models do: {advice}choose another architecture, or "
            "write a model plugin."
        )


def _gaps(
    model: CausalLmModel,
    asked: Sequence[Tensor],
    answers: Sequence[Tensor],
    media: Mapping[str, Any],
    expected: Sequence[Tensor],
) -> tuple[dict[str, float], float]:
    """Way of computing -> largest difference of a log-prob; and the largest that rounding explains."""
    ways = {"padded": pad_batch(asked, answers, pad_token=model.pad_token, conditions=media)}
    if model.packs:
        ways["packed"] = pack_batch(asked, answers, conditions=media)
    largest = float(torch.cat(list(expected)).abs().max())
    dtype = model.autocast or next(model.causal_lm.parameters()).dtype
    # Some ten layers of sums in another order; an error of masks or positions is of the order of the log-probs.
    bound = 64 * torch.finfo(dtype).eps * max(1.0, largest) if dtype is torch.float32 else 0.1 * max(1.0, largest)
    found = {name: _gap(_scored(model, batch), torch.cat(list(expected))) for name, batch in ways.items()}
    found["cached"] = max(_gap(*pair) for pair in _cached(model, asked, answers, media, expected))
    return found, bound


def _alone(model: CausalLmModel, prompt: Tensor, answer: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
    with model.precision():
        result = model.causal_lm(**model.plain_arguments(prompt, answer, conditions), use_cache=False)
    logits: Tensor = result.logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(dim=1).gather(1, answer[:, None].to(logits.device)).squeeze(1).cpu()


def _scored(model: CausalLmModel, batch: TokenBatch) -> Tensor:
    return model.score(batch, temperature=1.0)[0].cpu()


def _cached(
    model: CausalLmModel,
    prompts: Sequence[Tensor],
    answers: Sequence[Tensor],
    media: Mapping[str, Any],
    expected: Sequence[Tensor],
) -> list[tuple[Tensor, Tensor]]:
    """Log-probs of the next token of each answer and those expected, step by step, after each choice of rows."""
    longest = max(map(len, prompts))
    left = [longest - len(prompt) for prompt in prompts]
    tokens = torch.stack([
        torch.cat([torch.full((pad,), model.pad_token), prompt]) for pad, prompt in zip(left, prompts, strict=True)
    ])  # fmt: skip
    mask = torch.stack([torch.arange(longest) >= pad for pad in left])
    positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
    further: dict[str, Any] = {"conditions": media} if media else {}
    result: list[tuple[Tensor, Tensor]] = []
    rows, cache = torch.arange(len(prompts)), None
    for step, chosen in zip(range(min(map(len, answers))), _CHOICES, strict=False):
        logits, cache = model.next_logits(tokens, positions=positions, attention_mask=mask, cache=cache, **further)
        tokens, further = torch.stack([answers[row][step : step + 1] for row in rows.tolist()]), {}
        log_probs = logits.cpu().log_softmax(dim=1).gather(1, tokens).squeeze(1)
        result.append((log_probs, torch.stack([expected[row][step] for row in rows.tolist()])))
        index = torch.tensor(chosen)
        cache = model.select_cache(cache, index)
        rows, tokens, positions, mask = rows[index], tokens[index], positions[index, -1:] + 1, mask[index]
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
    return result


def _gap(result: Tensor, expected: Tensor) -> float:
    return float((result - expected).abs().nan_to_num(nan=torch.inf).max())
