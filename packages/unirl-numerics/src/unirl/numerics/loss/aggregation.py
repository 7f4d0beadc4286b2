"""Token weights in the loss of a batch of sequences, independent of how the batch is split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Aggregation", "AggregationMode", "aggregation_weights"]

AggregationMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@dataclass(frozen=True, kw_only=True)
class Aggregation:
    """Both go into a `LossTerm`; an algorithm announces the normalizer as its weights."""

    weights: Tensor
    """[n, L] fp32 >= 0."""
    normalizer: Tensor
    """[n] fp32 >= 0. The weighted sum of the losses is divided by its sum over the whole optimizer step."""


def aggregation_weights(
    valid: Tensor, row_weights: Tensor, mode: AggregationMode, *, horizon: float | None = None
) -> Aggregation:
    """Weights and normalizers of per-token losses, for any split into micro-batches and ranks.

    valid: [n, L] bool, tokens that are trained on.  row_weights: [n] >= 0, of the samples.
    With w a row's weight, T its valid tokens, and sums over all rows of the step:

    | mode | weight of a token | divided by | used by |
    |---|---|---|---|
    | token-mean | w | sum of w T | DAPO, arXiv 2503.14476 |
    | seq-mean-token-mean | w / T | sum of w | GRPO, arXiv 2402.03300; GSPO |
    | seq-mean-token-sum | w | sum of w | REINFORCE of whole sequences |
    | seq-mean-token-sum-norm | w / horizon | sum of w | Dr.GRPO, arXiv 2503.20783 |

    horizon: the constant of seq-mean-token-sum-norm, > 0, usually the maximum completion length. Other modes reject
    it.
    Rows without valid tokens and rows of weight 0 do not count in any mode.

    Raises ValueError for shapes that do not fit, an unknown mode, and a horizon that is missing or does not apply.
    """
    if valid.ndim != 2 or row_weights.shape != valid.shape[:1]:
        raise ValueError(
            f"aggregation_weights: valid has shape {list(valid.shape)}, row_weights {list(row_weights.shape)}; [n, L] "
            "and [n] are needed."
        )
    if (horizon is not None) != (mode == "seq-mean-token-sum-norm") or (horizon is not None and not horizon > 0):
        raise ValueError(
            f"aggregation_weights: horizon = {horizon} with mode '{mode}'; seq-mean-token-sum-norm takes a horizon "
            "above 0, the others none."
        )
    tokens = valid.sum(dim=1).float()
    rows = torch.where(tokens > 0, row_weights.float(), 0.0)
    if mode == "token-mean":
        token, normalizer = rows, rows * tokens
    elif mode == "seq-mean-token-mean":
        token, normalizer = rows / tokens.clamp_min(1), rows
    elif mode == "seq-mean-token-sum":
        token, normalizer = rows, rows
    elif mode == "seq-mean-token-sum-norm":
        token, normalizer = rows / (horizon or 1.0), rows
    else:
        raise ValueError(
            f"aggregation_weights: mode '{mode}' is not known; known are token-mean, seq-mean-token-sum, "
            "seq-mean-token-mean, seq-mean-token-sum-norm."
        )
    return Aggregation(weights=torch.where(valid, token[:, None], 0.0), normalizer=normalizer)
