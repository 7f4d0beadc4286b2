"""Soft penalty for completions close to the length limit."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["soft_overlong_penalty"]


def soft_overlong_penalty(lengths: Tensor, *, max_tokens: int, buffer: int) -> Tensor:
    """Penalty to add to the reward of samples of these lengths, from -1 to 0.

    lengths: [n] generated tokens.  Returns [n] fp32: 0 up to max_tokens - buffer, then linear down to -1 at max_tokens,
    and -1 beyond.

    Raises ValueError unless 0 < buffer <= max_tokens.
    Source: DAPO, arXiv 2503.14476, equation 13, with L_max = max_tokens and L_cache = buffer.
    """
    if not 0 < buffer <= max_tokens:
        raise ValueError(
            f"soft_overlong_penalty: buffer = {buffer}, max_tokens = {max_tokens}; expected 0 < buffer <= max_tokens."
        )
    past = (lengths - (max_tokens - buffer)).to(torch.float32)
    return -(past / buffer).clamp(0.0, 1.0)
