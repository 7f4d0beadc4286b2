"""Log-probs of chosen tokens and the entropy of their distributions, a few rows of the logits at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .output_rows import (
    OutputGradients,
    log_softmax_of,
    logits_of,
    result_dtype,
    row_slices,
    rows_at_a_time,
)
from .restricted import restricted_targets

__all__ = ["output_logits", "token_log_probs"]


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    with_entropy: bool = False,
    bias: Tensor | None = None,
    allowed: Mapping[int, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log softmax((hidden @ weight.T + bias) / temperature) at the targets, without materialising all logits.

    hidden: [T, D], of the predicting positions.  targets: [T] int64.
    weight: [V, D], the output projection, a plain tensor. Under FSDP2 call this inside the forward of the module that
    owns it, where it is unsharded.  bias: [V].
    temperature: of the sampler, > 0.
    chunk: rows of logits at a time; as many as `LOGITS_BUDGET` of `output_rows` allows if None.  It affects memory, and
    the results only by the rounding of a product of another shape.
    allowed: number of a target -> ids [K] that it was chosen from, of those that were not chosen from all, see
    `TokenBatch`: the softmax is over these alone, and computed from their rows of the weight; of one id the log-prob
    and the entropy are 0, without a gradient.
    Returns log-probs [T], and the entropies [T] in nats or None. Both are fp32 (fp64 for fp64 inputs) whatever the
    inputs' dtype or an autocast around the call, both differentiable once in hidden, weight and bias.

    Apart from the gradients, no tensor in forward or backward has more than chunk * V elements, and only a few of that
    size exist at once: only the inputs are saved, and backward recomputes the logits of each chunk. The gradient of a
    weight is computed only if needed, and accumulated in fp32 for a 16-bit weight. On CUDA the matrix products of bf16
    inputs have bf16 factors and fp32 sums; elsewhere the factors are fp32 as well.

    Raises ValueError for mismatched shapes, for a target outside the vocabulary or what it was allowed, and for a
    temperature or chunk that is not positive.
    """
    _check(hidden, weight, targets, bias=bias, temperature=temperature, chunk=chunk)
    rows = rows_at_a_time(weight) if chunk is None else chunk
    apply: Any = cast("Any", _TokenLogProbs).apply
    if not allowed:
        return apply(hidden, weight, bias, targets, temperature, rows, with_entropy)
    split = restricted_targets(allowed, targets, num_words=len(weight))
    own, further = apply(hidden[split.free], weight, bias, targets[split.free], temperature, rows, with_entropy)
    log_probs = own.new_zeros(len(targets)).index_copy(0, split.free, own)
    entropy = own.new_zeros(len(targets)).index_copy(0, split.free, further) if with_entropy else None
    for group, logits in zip(split.groups, split.logits(hidden, weight, bias), strict=True):
        scores = torch.log_softmax(logits / temperature, dim=1)
        log_probs = log_probs.index_copy(0, group.places, scores.gather(1, group.chosen[:, None]).squeeze(1))
        if entropy is not None:
            entropy = entropy.index_copy(0, group.places, _entropy(scores))
    return log_probs, entropy


def output_logits(hidden: Tensor, weight: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """hidden @ weight.T + bias with the summation order of `token_log_probs`, for sampling: other logits are another
    policy.

    hidden: [n, D].  weight: [V, D].  bias: [V].  Returns [n, V] fp32 (fp64 for fp64 inputs), also under an autocast.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        result = logits_of(hidden, weight, chunk=rows_at_a_time(weight))
        return result if bias is None else result.add_(bias)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.chunk = temperature, chunk
        log_probs = hidden.new_empty(len(targets), dtype=result_dtype(hidden, weight))
        entropy = torch.empty_like(log_probs) if with_entropy else None
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in row_slices(len(targets), chunk):
                scores = log_softmax_of(hidden[rows], weight, bias, temperature=temperature, chunk=chunk)
                log_probs[rows] = scores.gather(1, targets[rows, None]).squeeze(1)
                if entropy is not None:
                    entropy[rows] = _entropy(scores)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, targets = cast("tuple[Tensor, Tensor, Tensor | None, Tensor]", ctx.saved_tensors)
        needs = cast("tuple[bool, bool, bool]", ctx.needs_input_grad[:3])
        result = OutputGradients(hidden, weight, bias, needs=needs, chunk=ctx.chunk)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in row_slices(len(targets), ctx.chunk):
                scores = log_softmax_of(hidden[rows], weight, bias, temperature=ctx.temperature, chunk=ctx.chunk)
                parts = [None if gradient is None else gradient[rows, None] / ctx.temperature for gradient in gradients]
                grad_logits = _grad_logits(scores, targets[rows], *parts)
                result.add(rows, grad_logits)
                del scores, grad_logits  # before the next chunk is made
        return (*result.results(), *(None,) * 4)


def _grad_logits(scores: Tensor, targets: Tensor, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> Tensor:
    """Gradient of the logits, given those of log-probs [c, 1] and entropies [c, 1]; scores [c, V] is the log softmax.

    With probabilities p: 1_t - p for log p_t, and -p (log p + H) for the entropy H.
    """
    gradient = scores.exp()
    factor = torch.zeros_like(gradient[:, :1])
    if grad_log_probs is not None:
        factor = factor - grad_log_probs
    if grad_entropy is not None:
        factor = factor - grad_entropy * (_finite(scores) + _entropy(scores)[:, None])
    gradient *= factor
    if grad_log_probs is not None:
        gradient.scatter_add_(1, targets[:, None], grad_log_probs)
    return gradient


def _entropy(scores: Tensor) -> Tensor:
    """[c, V] -> [c]."""
    return -(scores.exp() * _finite(scores)).sum(dim=1)


def _finite(scores: Tensor) -> Tensor:
    # A token with logit -inf has p = 0 and log p = -inf; 0 times a finite number is the limit, 0.
    return scores.clamp_min(torch.finfo(scores.dtype).min)


def _check(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None, temperature: float, chunk: int | None
) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"token_log_probs: hidden has shape {list(hidden.shape)}, weight {list(weight.shape)}; "
            "expected [T, D] and [V, D]."
        )
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            f"token_log_probs: targets are {targets.dtype} {list(targets.shape)}, expected int64 [{len(hidden)}], one "
            "per row of hidden."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"token_log_probs: bias has shape {list(bias.shape)}, expected [{len(weight)}].")
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(
            f"token_log_probs: temperature = {temperature}; it must be above 0. Greedy tokens have no log-prob."
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"token_log_probs: chunk = {chunk}, expected a number of rows, 1 or more.")
    outside = (targets < 0) | (targets >= len(weight))
    if bool(outside.any()):
        place = int(outside.nonzero()[0])
        raise ValueError(
            f"token_log_probs: target {place} is token {int(targets[place])}, the weight has {len(weight)} rows. "
            "Tokens count from 0; check that the tokenizer belongs to the model."
        )
