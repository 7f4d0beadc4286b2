"""Divergences between the next-token distributions of a student and a teacher, a few rows of both logits at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from unirl.core.roles import DivergenceKind, OutputHead

from .output_rows import (
    OutputGradients,
    log_softmax_of,
    result_dtype,
    row_slices,
    rows_at_a_time,
)
from .restricted import restricted_targets

__all__ = ["dense_divergence", "token_divergence"]


def token_divergence(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    teacher: OutputHead,
    kind: DivergenceKind,
    beta: float = 0.5,
    top_k: int | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
    allowed: Mapping[int, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The divergence between student and teacher at every position, and the student's log-probs of the targets.

    hidden: [T, D] of the student, of the predicting positions.  weight: [V, D], its output projection, a plain tensor.
    targets: [T] int64.  teacher: hidden states [T, D'] at the same positions, and the projection [V', D'] of it. If V
    and V' differ, the further rows of one are padding of the vocabulary: they are left out of its softmax.
    kind, beta, top_k: see `dense_divergence`.  temperature: of the sampler, > 0, for both.
    chunk: rows of logits at a time; as many as the budget of `output_rows` allows if None.
    allowed: as in `token_log_probs`: both distributions are over these tokens alone.
    Returns two tensors [T], fp32 (fp64 for fp64 inputs). The first is differentiable once in hidden and weight, not in
    the teacher; the second has no gradient.

    Apart from the gradients, no tensor in forward or backward has more than chunk * V elements: only the inputs are
    saved, and backward recomputes the logits of both models for each chunk.
    Raises ValueError for mismatched shapes and for values out of their range.
    """
    _check(hidden, weight, targets, teacher, temperature=temperature, chunk=chunk)
    _check_settings(beta=beta, top_k=top_k)
    num_words = min(len(weight), len(teacher.weight))
    rows = rows_at_a_time(weight) if chunk is None else chunk
    settings = _Settings(kind, beta, top_k, temperature, rows)
    theirs = (teacher.hidden.detach(), teacher.weight[:num_words].detach())
    # The whole weight as it is: FSDP2 frees and gathers its storage between forward and backward.
    own = weight if len(weight) == num_words else weight[:num_words]
    apply: Any = cast("Any", _TokenDivergence).apply
    if not allowed:
        return apply(hidden, own, *theirs, targets, settings)
    split = restricted_targets(allowed, targets, num_words=num_words)
    free = split.free
    result = apply(hidden[free], own, theirs[0][free], theirs[1], targets[free], settings)
    values, log_probs = (one.new_zeros(len(targets)).index_copy(0, free, one) for one in result)
    for group, *pair in zip(split.groups, split.logits(hidden, own), split.logits(*theirs), strict=True):
        student, other = (torch.log_softmax(logits / temperature, dim=1) for logits in pair)
        outcomes = _outcomes(student, other.to(student.dtype), top_k)
        values = values.index_copy(0, group.places, _values(outcomes, kind, beta))
        chosen = student.detach().gather(1, group.chosen[:, None]).squeeze(1)
        log_probs = log_probs.index_copy(0, group.places, chosen)
    return values, log_probs


def dense_divergence(
    student: Tensor, teacher: Tensor, *, kind: DivergenceKind, beta: float = 0.5, top_k: int | None = None
) -> Tensor:
    """Divergence of two distributions, in nats. student, teacher: [T, V] log-probs.  Returns [T], no gradient.

    With q of the teacher and p of the student: `forward` is KL(q || p), which covers all that the teacher does;
    `reverse` is KL(p || q), which seeks its modes; `jensen` is the generalised Jensen-Shannon divergence
    beta KL(q || m) + (1 - beta) KL(p || m) with m = beta q + (1 - beta) p (GKD, arXiv 2306.13649, equation 1), which
    divided by beta tends to `forward` for beta to 0, and divided by 1 - beta to `reverse` for beta to 1.
    beta: strictly between 0 and 1; of `jensen` alone.
    top_k: of the tokens, those k that are likeliest for the teacher are compared one by one, and all others together,
    as one outcome: the divergence of two distributions over k + 1 outcomes, never above that over all tokens (data
    processing inequality), and 0 only if they are equal. None compares all tokens.
    """
    _check_settings(beta=beta, top_k=top_k)
    return _values(_outcomes(student, teacher, top_k), kind, beta)


class _Settings(NamedTuple):
    kind: DivergenceKind
    beta: float
    top_k: int | None
    temperature: float
    chunk: int


class _Outcomes(NamedTuple):
    """Outcomes to compare, as log-probs [c, K]: single tokens, and with `top_k` the rest as one."""

    student: Tensor
    teacher: Tensor
    words: Tensor | None
    """[c, K - 1]: tokens of all outcomes except the last, which is the rest; None is every token by itself."""

    def spread(self, values: Tensor, num_words: int) -> Tensor:
        """[c, K] -> [c, V]: the value of the outcome that each token belongs to."""
        if self.words is None:
            return values
        return values[:, -1:].repeat(1, num_words).scatter_(1, self.words, values[:, :-1])


class _TokenDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        targets: Tensor,
        settings: _Settings,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, teacher_hidden, teacher_weight)
        ctx.set_materialize_grads(False)
        ctx.settings = settings
        values = hidden.new_empty(len(targets), dtype=result_dtype(hidden, weight))
        log_probs = torch.empty_like(values)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in row_slices(len(targets), settings.chunk):
                student = _log_probs(hidden[rows], weight, settings)
                log_probs[rows] = student.gather(1, targets[rows, None]).squeeze(1)
                teacher = _log_probs(teacher_hidden[rows], teacher_weight, settings).to(student.dtype)
                values[rows] = _values(_outcomes(student, teacher, settings.top_k), settings.kind, settings.beta)
                del student, teacher  # before the next chunk is made
        ctx.mark_non_differentiable(log_probs)
        return values, log_probs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, teacher_hidden, teacher_weight = cast("tuple[Tensor, ...]", ctx.saved_tensors)
        settings: _Settings = ctx.settings
        needs = cast("tuple[bool, bool]", ctx.needs_input_grad[:2])
        result = OutputGradients(hidden, weight, None, needs=(*needs, False), chunk=settings.chunk)
        (outer, _) = gradients
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in row_slices(len(hidden), settings.chunk) if outer is not None else ():
                student = _log_probs(hidden[rows], weight, settings)
                teacher = _log_probs(teacher_hidden[rows], teacher_weight, settings).to(student.dtype)
                grad_logits = _grad_logits(student, teacher, settings)
                assert outer is not None
                result.add(rows, grad_logits.mul_(outer[rows, None] / settings.temperature))
                del student, teacher, grad_logits
        if outer is None:
            return (None,) * 6
        grad_hidden, grad_weight, _ = result.results()
        return grad_hidden, grad_weight, *(None,) * 4


def _log_probs(rows: Tensor, weight: Tensor, settings: _Settings) -> Tensor:
    return log_softmax_of(rows, weight, None, temperature=settings.temperature, chunk=settings.chunk)


def _outcomes(student: Tensor, teacher: Tensor, top_k: int | None) -> _Outcomes:
    if top_k is None or top_k >= teacher.shape[1]:
        return _Outcomes(student, teacher, None)
    words = teacher.topk(top_k, dim=1).indices

    def lumped(scores: Tensor) -> Tensor:
        # Not log(1 - sum): nearly all of the mass may be in the top k.
        rest = scores.scatter(1, words, -math.inf).logsumexp(dim=1, keepdim=True)
        return torch.cat([scores.gather(1, words), rest], dim=1)

    return _Outcomes(lumped(student), lumped(teacher), words)


def _values(outcomes: _Outcomes, kind: DivergenceKind, beta: float) -> Tensor:
    student, teacher = outcomes.student, outcomes.teacher
    if kind == "forward":
        return _kl(teacher, student)
    if kind == "reverse":
        return _kl(student, teacher)
    mixture = _mixture(student, teacher, beta)
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _grad_logits(student: Tensor, teacher: Tensor, settings: _Settings) -> Tensor:
    """Gradient [c, V] of the divergences in the student's logits (before their temperature).

    The logit of token i moves the probability P_b of an outcome by p_i (1[i in b] - P_b), so with f_b the derivative in
    P_b the gradient is p_i (f_b(i) - sum_b P_b f_b). For `reverse` f = log P - log Q; for `jensen`, where the
    derivatives through M cancel, f = (1 - beta) (log P - log M); for `forward` P_b f_b = -Q_b.
    """
    outcomes, num_words = _outcomes(student, teacher, settings.top_k), student.shape[1]
    if settings.kind == "forward":
        # q_b p_i / P_b, where p_i / P_b is at most 1: P_b alone may underflow.
        return (
            student.exp() - (outcomes.spread(outcomes.teacher - _finite(outcomes.student), num_words) + student).exp_()
        )
    if settings.kind == "reverse":
        slope = _finite(outcomes.student) - _finite(outcomes.teacher)
    else:
        mixture = _mixture(outcomes.student, outcomes.teacher, settings.beta)
        slope = (1 - settings.beta) * (_finite(outcomes.student) - _finite(mixture))
    mean = (outcomes.student.exp() * slope).sum(dim=1, keepdim=True)
    return outcomes.spread(slope - mean, num_words).mul_(student.exp())


def _mixture(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """log(beta q + (1 - beta) p)."""
    return torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))


def _kl(first: Tensor, second: Tensor) -> Tensor:
    """KL(first || second) of log-probs [c, K] -> [c]."""
    return (first.exp() * (_finite(first) - _finite(second))).sum(dim=1)


def _finite(scores: Tensor) -> Tensor:
    # A token with logit -inf has p = 0 and log p = -inf; 0 times a finite number is the limit, 0.
    return scores.clamp_min(torch.finfo(scores.dtype).min / 2)


def _check(
    hidden: Tensor, weight: Tensor, targets: Tensor, teacher: OutputHead, *, temperature: float, chunk: int | None
) -> None:
    for name, states, projection in (("", hidden, weight), ("teacher's ", teacher.hidden, teacher.weight)):
        if states.ndim != 2 or projection.ndim != 2 or states.shape[1] != projection.shape[1]:
            raise ValueError(
                f"token_divergence: the {name}hidden has shape {list(states.shape)}, its weight "
                f"{list(projection.shape)}; expected [T, D] and [V, D]."
            )
    if not len(hidden) == len(teacher.hidden) == len(targets):
        raise ValueError(
            f"token_divergence: got {len(hidden)} positions of the student, {len(teacher.hidden)} of the teacher and "
            f"{len(targets)} targets; expected as many of each."
        )
    num_words = min(len(weight), len(teacher.weight))
    if bool(((targets < 0) | (targets >= num_words)).any()):
        raise ValueError(
            f"token_divergence: got targets from {int(targets.min())} to {int(targets.max())}, expected tokens of both "
            f"models, 0 to {num_words - 1}. Check that their tokenizers are equal."
        )
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"token_divergence: got temperature {temperature}, expected above 0.")
    if chunk is not None and chunk < 1:
        raise ValueError(f"token_divergence: got chunk {chunk}, expected a number of rows, 1 or more.")


def _check_settings(*, beta: float, top_k: int | None) -> None:
    if not 0 < beta < 1:
        raise ValueError(f"token_divergence: got beta {beta}, expected a number between 0 and 1.")
    if top_k is not None and top_k < 1:
        raise ValueError(f"token_divergence: got top_k {top_k}, expected 1 or more, or None for all tokens.")
