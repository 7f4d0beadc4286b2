"""Seeded token sampling: the same seed, step and distribution give the same token in every engine.

Imports only numpy and torch, so that external engines can use it in their environments.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["BLOCK", "TokenSampler", "choose_tokens", "draws"]

BLOCK = 64
"""Number of uniform draws generated at once for a seed."""
_PER_COUNT = 4
"""Numbers that Philox generates per counter value."""


def draws(seed: int, block: int) -> NDArray[np.float64]:
    """[BLOCK] uniform numbers in [0, 1) for the steps from `block * BLOCK` on of a sample with this seed.

    Counter-based: Philox 4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with the seed as
    its key, so any block can be generated without the previous ones.
    """
    return np.random.Generator(np.random.Philox(key=seed, counter=block * (BLOCK // _PER_COUNT))).random(BLOCK)


def choose_tokens(
    logits: Tensor, uniform: Tensor, *, temperature: float, top_p: float = 1.0, top_k: int = 0
) -> tuple[Tensor, Tensor]:
    """The token of each row at which the cumulative probability passes `uniform`.

    logits: [B, V].  uniform: [B] fp64 in [0, 1).  temperature 0 takes the most likely token.
    top_p: only the most likely tokens that together reach it.  top_k: only that many most likely tokens; 0 is all.
    Returns tokens [B] int64 and their log-probs [B] fp32, normalised over all tokens whatever top_p and top_k; NaN
    where logits are NaN or infinite.

    Sums are fp64, so that a token of any probability representable in fp32 can be sampled.
    """
    scores = torch.log_softmax(logits.float() / (temperature or 1.0), dim=1)
    if temperature == 0:
        tokens = scores.argmax(dim=1)
        return tokens, scores.gather(1, tokens[:, None]).squeeze(1)
    probabilities = scores.double().exp()
    if top_k or top_p < 1:
        probabilities = _likeliest(probabilities, top_p=top_p, top_k=top_k)
    reached = probabilities.cumsum(dim=1)
    total = reached[:, -1:]
    place = torch.searchsorted(reached, uniform.to(reached)[:, None] * total, right=True)
    # The product may round up to the total; the first token that reaches it is then chosen.
    last = torch.searchsorted(reached, total.contiguous())
    # With NaN among the logits both lie past the end; the log-prob is NaN, for the caller to see.
    tokens = torch.minimum(place, last).clamp(max=scores.shape[1] - 1)
    return tokens.squeeze(1), scores.gather(1, tokens).squeeze(1)


@dataclass(frozen=True, kw_only=True)
class TokenSampler:
    """Token sampler: `choose_tokens` with its settings."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0

    def choose(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """See `choose_tokens`."""
        return choose_tokens(logits, uniform, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)


def _likeliest(probabilities: Tensor, *, top_p: float, top_k: int) -> Tensor:
    """[B, V] with 0 for all but the most likely tokens; ties go to the first."""
    ranked, order = probabilities.sort(dim=1, descending=True, stable=True)
    kept = ranked.cumsum(dim=1) - ranked < top_p
    if top_k:
        kept[:, top_k:] = False
    return probabilities * torch.zeros_like(kept).scatter(1, order, kept)
