"""Token losses of given numbers, instead of a model's outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from unirl.conformance.reference import TokenLossInputs
from unirl.core.roles import Losses, ReplayedTokens
from unirl.core.types.track import Status, TextSegment, Track
from unirl.numerics.loss.reduction import reduce_terms, weight_totals

from .tracks import one_group

__all__ = ["GivenReplay", "random_inputs", "reduced", "track_of"]


def random_inputs(**changed: Any) -> TokenLossInputs:
    """Seven completions of up to nine tokens: one empty, one truncated, one with advantage 0, one of weight 0, one of
    weight 1/2, one with untrained tokens in its middle."""
    rng = np.random.default_rng(3)
    lengths = np.array([9, 4, 0, 7, 1, 9, 5])
    valid = np.arange(9)[None] < lengths[:, None]
    valid[3, 2:4] = False
    live = rng.normal(-1.5, 0.6, valid.shape)
    given: dict[str, Any] = {
        "log_probs": live,
        "old_log_probs": live + rng.normal(0, 0.1, valid.shape),
        "engine_log_probs": live + rng.normal(0, 0.1, valid.shape),
        "reference_log_probs": live + rng.normal(0, 0.3, valid.shape),
        "entropy": rng.uniform(0, 2, valid.shape),
        "valid": valid,
        # Multiples of 1/8, so that fp32 holds them.
        "advantages": np.array([1.25, -0.5, 0.75, -1.5, 0.0, 2.0, -0.875]),
        "weights": np.array([1.0, 1.0, 1.0, 0.5, 1.0, 0.0, 1.0]),
        "is_truncated": np.array([True, False, False, False, False, True, False]),
    }
    return TokenLossInputs(**{**given, **changed})


def track_of(given: TokenLossInputs) -> Track:
    """A track with these numbers, with the fields of a track after the old-log-prob pass."""
    rows, width = given.valid.shape
    # A completion ends after its last trained token.
    lengths = [int(np.max(np.flatnonzero(row), initial=-1)) + 1 for row in given.valid]
    lengths[0] = width

    def per_sample(values: Any) -> tuple[torch.Tensor, ...] | None:
        if values is None:
            return None
        return tuple(torch.tensor(row[:length]) for row, length in zip(values, lengths, strict=True))

    per_text = given.advantages if given.advantages.ndim == 1 else None
    return one_group(
        TextSegment(
            prompt_tokens=(torch.zeros(1, dtype=torch.int64),) * rows,
            tokens=per_sample(np.zeros((rows, width), dtype=np.int64)),
            log_probs=per_sample(given.old_log_probs),
            engine_log_probs=per_sample(given.engine_log_probs),
            advantages=per_sample(given.advantages) if per_text is None else None,
            values=per_sample(given.old_values),
            returns=per_sample(given.returns),
            mask=per_sample(given.valid),
        ),
        advantages=None if per_text is None else torch.tensor(per_text, dtype=torch.float32),
        kl_weights=None if given.kl_weights is None else torch.tensor(given.kl_weights, dtype=torch.float32),
        sample_weights=torch.tensor(given.weights, dtype=torch.float32),
        status=tuple(Status.TRUNCATED if cut else Status.COMPLETED for cut in given.is_truncated),
    )


class GivenReplay:
    """Given log-probs and entropies, in place of a model."""

    def __init__(self, given: TokenLossInputs) -> None:
        self._given = given

    def __call__(self, track: Track, *, policy: str = "live") -> ReplayedTokens:
        given = self._given
        values = given.log_probs if policy == "live" else given.reference_log_probs
        return ReplayedTokens(
            log_probs=torch.tensor(values), entropy=torch.tensor(given.entropy), valid=torch.tensor(given.valid)
        )


def reduced(losses: Losses, weights: Any) -> float:
    """The loss as one number, reduced as in the train stack."""
    return float(reduce_terms(losses.terms, totals=weight_totals(weights)))
