"""From rewards to advantages: centred per group, scaled, with degenerate groups at exactly zero."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .rank_values import RewardValues, rank_values

Scope = Literal["group", "global"]
Mode = Literal["sum-then-normalize", "normalize-then-sum", "normalize-sum-normalize"]
_Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """Advantages of a batch, and how much of the batch has no learning signal."""

    values: Tensor
    """[N] fp32 on the rewards' device, in the rewards' order; 0 for rows of weight 0."""
    num_groups: int
    """Groups with at least one row of weight > 0."""
    num_zero_spread_groups: int
    """Groups of two or more whose rewards are all equal."""
    num_singleton_groups: int
    """Groups with one row of weight > 0."""


def advantages(
    rewards: Tensor,
    *,
    group_ids: Sequence[Hashable],
    scope: Scope = "group",
    center: Scope = "group",
    ddof: Literal[0, 1] = 0,
    eps: float = 1e-4,
    normalize: bool = True,
    leave_one_out: bool = False,
    clip: float | None = None,
    weights: Tensor | None = None,
) -> Advantages:
    """(reward - mean) / (std + eps), computed in fp64.

    rewards: [N].  group_ids: [N]; groups may differ in size and rows may come in any order.
    scope: where the std comes from.  center: where the mean comes from.
    ddof: 0 for the population std, 1 for Bessel's.
    normalize: False leaves out the std (Dr.GRPO).
    leave_one_out: the baseline of a row is the mean of the others (RLOO), n / (n - 1) times the centred
    reward.
    clip: clamp to [-clip, clip], last.
    weights: [N]; rows of weight 0 take no part in any statistic and get 0.  Other weights count as 1 here.

    With center = "group", a group of one and a group whose rewards are all equal get exactly 0, rounding
    included.

    Raises ValueError for a reward that is not finite, naming the sample, for an eps or a clip below 0 or NaN, and for
    center "global" with the std of groups.
    Source: GRPO, arXiv 2402.03300; Flow-GRPO takes scope "global"; Dr.GRPO, arXiv 2503.20783; RLOO,
    arXiv 2402.14740.
    """
    _check_bounds(eps=eps, clip=clip)
    batch = _Batch(group_ids, weights=weights, num_rows=rewards.shape[0])
    scored = batch.rewards(rewards, name="rewards")
    values = _normalized(
        scored, batch, scope=scope, center=center, ddof=ddof, eps=eps, normalize=normalize, leave_one_out=leave_one_out
    )
    return batch.finish(values, is_constant=batch.is_constant(scored), clip=clip, device=rewards.device)


def combine_rewards(
    parts: Mapping[str, Tensor],
    *,
    weights: Mapping[str, float],
    group_ids: Sequence[Hashable],
    mode: Mode = "sum-then-normalize",
    values: Mapping[str, RewardValues] | None = None,
    spread_penalty: float = 0.0,
    shaping: Collection[str] = (),
    scope: Scope = "group",
    center: Scope = "group",
    ddof: Literal[0, 1] = 0,
    eps: float = 1e-4,
    normalize: bool = True,
    leave_one_out: bool = False,
    clip: float | None = None,
    row_weights: Tensor | None = None,
) -> Advantages:
    """Advantages of several rewards at once.

    parts: name -> [N].  weights: the factor of each part; the names must be the same.
    row_weights: the `weights` of `advantages`; the other arguments are as there.
    mode: "sum-then-normalize" adds the rewards first, so the part with the widest scale decides.
    "normalize-then-sum" adds the advantages of the parts, so each counts by its weight.
    "normalize-sum-normalize" also whitens that sum over the batch, so its scale does not grow with the number of parts
    (GDPO, arXiv 2601.05242).
    values: name -> what takes the place of a part's scores before that, see `rank_values`; the scores where it is not
    named.
    spread_penalty: times how far the parts of a sample are apart, see `_spread`, subtracted from what is added: scores,
    or advantages, of which it is centred as they are (Coste et al., arXiv 2310.02743, with the standard deviation in
    place of the variance).  shaping: names of terms that are not rewards and do not count in it.
    A group counts as zero-spread when every part with a weight is constant in it.

    Raises ValueError for names that do not match, for a weight that is not finite, for a penalty below 0 or NaN, and as
    `advantages` does, naming the part as well.
    """
    if parts.keys() != weights.keys() or not parts:
        raise ValueError(
            f"combine_rewards: rewards are {sorted(parts)}, weights are for {sorted(weights)}. Give each "
            "reward one weight."
        )
    for name, weight in weights.items():
        if not math.isfinite(weight):
            raise ValueError(f"combine_rewards: weights['{name}'] = {weight}; expected a finite number.")
    _check_bounds(eps=eps, clip=clip)
    if not spread_penalty >= 0:
        raise ValueError(f"combine_rewards: spread_penalty = {spread_penalty}; expected 0 or more.")
    first = next(iter(parts.values()))
    batch = _Batch(group_ids, weights=row_weights, num_rows=first.shape[0])
    chosen = values or {}
    scored = {
        name: rank_values(batch.rewards(part, name=f"rewards['{name}']"), batch.group, kind=chosen.get(name, "scores"))
        for name, part in parts.items()
    }

    def normalized(part: _Floats, *, normalize: bool = normalize) -> _Floats:
        return _normalized(
            part,
            batch,
            scope=scope,
            center=center,
            ddof=ddof,
            eps=eps,
            normalize=normalize,
            leave_one_out=leave_one_out,
        )

    def penalty(parts: Mapping[str, _Floats]) -> _Floats:
        counted = {name: weights[name] for name in parts if weights[name] and name not in shaping}
        return spread_penalty * _spread(parts, counted)

    if mode == "sum-then-normalize":
        combined = _weighted_sum(scored, weights)
        combined = normalized(combined - penalty(scored) if spread_penalty else combined)
    elif mode in ("normalize-then-sum", "normalize-sum-normalize"):
        each = {name: normalized(part) for name, part in scored.items()}
        combined = _weighted_sum(each, weights)
        if spread_penalty:
            combined = combined - normalized(penalty(each), normalize=False)
    else:
        raise ValueError(f"combine_rewards: mode '{mode}' is not known; known are {', '.join(get_args(Mode))}.")
    is_constant = np.ones(len(batch.sizes), dtype=np.bool_)
    for name, part in scored.items():
        if weights[name]:
            is_constant &= batch.is_constant(part)
    if mode == "normalize-sum-normalize":
        combined = _normalized(
            combined, batch, scope="global", center="global", ddof=ddof, eps=eps, normalize=True, leave_one_out=False
        )
        if center == "group":
            # Their sum is 0, and the rounding of the batch's mean must not give them a tiny signal.
            combined = np.where(is_constant[batch.group], 0.0, combined)
    return batch.finish(combined, is_constant=is_constant, clip=clip, device=first.device)


def _check_bounds(*, eps: float, clip: float | None) -> None:
    if not eps >= 0 or (clip is not None and not clip >= 0):
        raise ValueError(f"advantages: eps = {eps}, clip = {clip}; expected eps >= 0, and clip >= 0 or None.")


def _weighted_sum(parts: Mapping[str, _Floats], weights: Mapping[str, float]) -> _Floats:
    return np.sum([weights[name] * part for name, part in parts.items()], axis=0)


def _spread(parts: Mapping[str, _Floats], weights: Mapping[str, float]) -> _Floats:
    """[counted rows]: the weighted standard deviation of the parts of each row, times the sum of the absolute weights,
    so that it has the scale of their weighted sum. Parts of negative weight have their sign turned."""
    signed = np.array([np.sign(weight) * parts[name] for name, weight in weights.items()])
    sizes = np.abs(np.array(list(weights.values())))[:, None]
    whole = sizes.sum()
    mean = (sizes * signed).sum(axis=0) / whole
    return np.sqrt(whole * (sizes * (signed - mean) ** 2).sum(axis=0))


class _Batch:
    """Which rows count, and which group each belongs to.  Arrays below hold the counted rows only."""

    def __init__(self, group_ids: Sequence[Hashable], *, weights: Tensor | None, num_rows: int) -> None:
        if len(group_ids) != num_rows:
            raise ValueError(f"advantages: {num_rows} rewards but {len(group_ids)} group ids. Give one id per sample.")
        self._num_rows = num_rows
        self._counted = np.arange(num_rows)
        if weights is not None:
            if weights.shape != (num_rows,) or bool((weights < 0).any()):
                raise ValueError(f"advantages: weights must be [{num_rows}] numbers >= 0, found {weights}.")
            self._counted = np.flatnonzero(_float64(weights) > 0)
        numbers: dict[Hashable, int] = {}
        self.group = np.array(
            [numbers.setdefault(group_ids[int(row)], len(numbers)) for row in self._counted], dtype=np.int64
        )
        self.sizes = np.bincount(self.group, minlength=len(numbers))

    def rewards(self, values: Tensor, *, name: str) -> _Floats:
        if values.shape != (self._num_rows,):
            raise ValueError(f"{name}: shape {list(values.shape)}; [{self._num_rows}] is needed, one per sample.")
        counted = _float64(values)[self._counted]
        bad = np.flatnonzero(~np.isfinite(counted))
        if len(bad):
            raise ValueError(
                f"{name}: sample {self._counted[bad[0]]} has {counted[bad[0]]}, and {len(bad)} in all are "
                "not finite. Fix the scorer, or give failed samples weight 0."
            )
        return counted

    def group_sum(self, values: _Floats) -> _Floats:
        """[groups]."""
        sums = np.zeros(len(self.sizes))
        np.add.at(sums, self.group, values)
        return sums

    def is_constant(self, values: _Floats) -> NDArray[np.bool_]:
        """[groups]: all rewards equal, exactly."""
        low, high = np.full(len(self.sizes), np.inf), np.full(len(self.sizes), -np.inf)
        np.minimum.at(low, self.group, values)
        np.maximum.at(high, self.group, values)
        return low == high

    def finish(
        self, values: _Floats, *, is_constant: NDArray[np.bool_], clip: float | None, device: torch.device
    ) -> Advantages:
        full = np.zeros(self._num_rows)
        full[self._counted] = values if clip is None else np.clip(values, -clip, clip)
        return Advantages(
            values=torch.tensor(full, dtype=torch.float32, device=device),
            num_groups=len(self.sizes),
            num_zero_spread_groups=int((is_constant & (self.sizes > 1)).sum()),
            num_singleton_groups=int((self.sizes == 1).sum()),
        )


def _normalized(
    rewards: _Floats,
    batch: _Batch,
    *,
    scope: Scope,
    center: Scope,
    ddof: int,
    eps: float,
    normalize: bool,
    leave_one_out: bool,
) -> _Floats:
    """[counted rows]."""
    for name, value in (("scope", scope), ("center", center)):
        if value not in ("group", "global"):
            raise ValueError(f"advantages: {name} '{value}' is not known; known are group, global.")
    if normalize and scope == "group" and center == "global":
        raise ValueError(
            "advantages: center 'global' with scope 'group' would divide a zero-variance group by eps alone. "
            "Set scope to 'global', or normalize to false."
        )
    if len(rewards) == 0:
        return rewards
    sizes = batch.sizes if center == "group" else np.array([len(rewards)])
    index = batch.group if center == "group" else np.zeros(len(rewards), dtype=np.int64)
    sums = batch.group_sum(rewards) if center == "group" else np.array([rewards.sum()])
    centred = rewards - (sums / sizes)[index]
    if leave_one_out:
        centred = centred * (sizes / np.maximum(sizes - 1, 1))[index]
    if normalize:
        scale = _std(rewards, batch, scope=scope, ddof=ddof) + eps
        # With zero variance and eps = 0 the division is 0 / 0: such rows are 0.
        centred = np.divide(centred, scale, out=np.zeros_like(centred), where=scale > 0)
    # Rounding of the mean must not give a zero-variance group a tiny signal, least of all divided by eps.
    is_constant = batch.is_constant(rewards)[batch.group] if center == "group" else np.ptp(rewards) == 0
    return np.where(is_constant, 0.0, centred)


def _std(rewards: _Floats, batch: _Batch, *, scope: Scope, ddof: int) -> _Floats:
    """[counted rows].  0 where there are too few rows for one."""
    if scope == "global":
        return np.full(len(rewards), rewards.std(ddof=ddof) if len(rewards) > ddof else 0.0)
    means = batch.group_sum(rewards) / batch.sizes
    squares = batch.group_sum((rewards - means[batch.group]) ** 2)
    return np.sqrt(squares / np.maximum(batch.sizes - ddof, 1))[batch.group]


def _float64(values: Tensor) -> _Floats:
    return values.detach().double().cpu().numpy()
