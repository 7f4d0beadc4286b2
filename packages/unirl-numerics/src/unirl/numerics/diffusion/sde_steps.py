"""Selects the stochastic denoising steps, a pure function of (seed, rollout, group id), and those trained on.

All samples of a group share their steps: if more than the noise differed, the group's baseline would compare samples
of different policies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from unirl.numerics.noise import SDE_STEPS, TRAIN_STEPS, stream

Mode = Literal["all", "fraction", "random", "window", "fixed"]
Strategy = Literal["progressive", "random"]

_Draw = Callable[[str], NDArray[np.int64]]

_SHARED = ""
"""Label of a draw shared by all groups."""
_FLOOR_SLACK = 1e-9
"""Makes 0.57 of 100 steps 57, although the product is 56.99999999999999 in fp64."""


def select_sde_steps(
    *,
    mode: Mode,
    num_steps: int,
    rollout: int,
    group_ids: Sequence[str],
    seed: int,
    first: int | float = 0,
    last: int | float | None = None,
    count: int | None = None,
    window: int = 4,
    strategy: Strategy = "progressive",
    move_every: int | None = None,
    overlap: int = 0,
    roll_back: bool = False,
    per_group: bool = False,
    steps: Sequence[int] = (),
) -> NDArray[np.int64]:
    """The stochastic steps of each sample.  Returns [len(group_ids), S] int64, rising along S.

    mode: "all" steps; "fraction", the pool [first, last); "random", `count` steps of the pool, sampled anew
    every rollout; "window", `window` consecutive steps of the pool; "fixed", exactly `steps`.
    first, last: the pool.  An int counts steps, a float is a fraction of them, rounded down: last = 0.99 of
    10 steps leaves out the last one.  None is the last step.
    strategy: a progressive window moves on by `window - overlap` every `move_every` rollouts and stays at the
    last place that fits, or starts again with `roll_back`.  A random window starts anywhere in the pool.
    move_every: rollouts between moves; None is 25 for a progressive window and 1 for a random one.
    per_group: random draws differ from group to group instead of being shared.

    Raises ValueError for steps out of range, a window larger than the pool, an empty selection, and for an
    argument that the mode would ignore.
    Source: windows as in MixGRPO, arXiv 2507.21802.
    """
    begin = _as_step(first, num_steps=num_steps, name="first")
    end = num_steps if last is None else _as_step(last, num_steps=num_steps, name="last")
    if begin >= end:
        raise ValueError(
            f"sde_steps: the pool [{begin}, {end}) of {num_steps} steps is empty (first = {first}, last = "
            f"{last}). Make `last` larger than `first`."
        )
    if per_group and not (mode == "random" or (mode == "window" and strategy == "random")):
        raise ValueError(f"sde_steps: per_group needs random draws, but mode is '{mode}'. Set per_group to false.")
    if mode in ("all", "fixed") and (begin, end) != (0, num_steps):
        raise ValueError(
            f"sde_steps: mode '{mode}' takes no pool, got first = {first}, last = {last}. Use mode 'fraction'."
        )
    if mode == "all" or mode == "fraction":
        chosen = np.arange(begin, end)
    elif mode == "fixed":
        chosen = _fixed(steps, num_steps=num_steps)
    elif mode == "random":
        size = _count(count, pool=end - begin)
        return _per_group(
            group_ids,
            per_group=per_group,
            draw=lambda label: begin + _draw_without_replacement(seed, rollout, label, pool=end - begin, count=size),
        )
    elif mode == "window":
        places = _window_places(begin, end, window=window, overlap=overlap, strategy=strategy)
        turn = rollout // _move_every(move_every, strategy=strategy)
        if strategy == "random":
            return _per_group(
                group_ids,
                per_group=per_group,
                draw=lambda label: places[_draw_index(seed, turn, label, len(places))] + np.arange(window),
            )
        place = turn % len(places) if roll_back else min(turn, len(places) - 1)
        chosen = places[place] + np.arange(window)
    else:
        raise ValueError(f"sde_steps: mode '{mode}' is not known; choose all, fraction, random, window or fixed.")
    return np.tile(chosen.astype(np.int64), (len(group_ids), 1))


def select_train_steps(
    sde_steps: NDArray[np.int64], *, fraction: float, seed: int, rollout: int, sample_ids: Sequence[str]
) -> NDArray[np.int64]:
    """The stochastic steps of each sample that are trained on.  Returns [N, R] int64, rising along R.

    sde_steps: [N, S], rising, without padding.  fraction: in (0, 1], R = max(1, floor(fraction S)).
    Sampled uniformly without replacement, per sample and anew in every rollout: unlike the choice of stochastic steps
    it is not part of the policy, so samples of a group need not share it.

    Raises ValueError for a fraction outside (0, 1], and if there is no stochastic step.
    Source: DanceGRPO, arXiv 2505.07818, its selection of timesteps.
    """
    num_rows, pool = sde_steps.shape
    if not 0 < fraction <= 1 or not pool or num_rows != len(sample_ids):
        raise ValueError(
            f"train_steps: got fraction = {fraction}, sde_steps {list(sde_steps.shape)} and {len(sample_ids)} samples; "
            "expected 0 < fraction <= 1 and [N, S] with S >= 1."
        )
    count = max(1, math.floor(pool * fraction + _FLOOR_SLACK))
    drawn = [
        _draw_without_replacement(seed, rollout, sample, pool=pool, count=count, step=TRAIN_STEPS)
        for sample in sample_ids
    ]
    chosen = np.array(drawn, dtype=np.int64).reshape(num_rows, count)
    return np.take_along_axis(sde_steps, chosen, axis=1)


def _per_group(group_ids: Sequence[str], *, per_group: bool, draw: _Draw) -> NDArray[np.int64]:
    labels = list(group_ids) if per_group else [_SHARED] * len(group_ids)
    drawn = {label: draw(label).astype(np.int64) for label in dict.fromkeys([*labels, _SHARED])}
    width = len(drawn[_SHARED])
    return np.stack([drawn[label] for label in labels]) if labels else np.empty((0, width), dtype=np.int64)


def _draw_without_replacement(
    seed: int, rollout: int, label: str, *, pool: int, count: int, step: int = SDE_STEPS
) -> NDArray[np.int64]:
    raw = stream(seed=seed, rollout=rollout, label=label, step=step).random_raw(pool)
    return np.sort(np.argsort(raw, kind="stable")[:count])


def _draw_index(seed: int, rollout: int, label: str, size: int) -> int:
    # 64 random bits modulo a few steps: the bias is below 1e-17.
    return int(stream(seed=seed, rollout=rollout, label=label, step=SDE_STEPS).random_raw() % size)


def _window_places(begin: int, end: int, *, window: int, overlap: int, strategy: Strategy) -> NDArray[np.int64]:
    """Possible starts of the window, rising."""
    if not 1 <= window <= end - begin:
        raise ValueError(
            f"sde_steps: a window of {window} does not fit into the {end - begin} steps of the pool [{begin}, {end})."
        )
    if strategy == "random":
        stride = 1
    elif strategy == "progressive":
        stride = window - overlap
    else:
        raise ValueError(f"sde_steps: strategy '{strategy}' is not known; choose progressive or random.")
    if not 0 <= overlap < window:
        raise ValueError(f"sde_steps: overlap = {overlap}; it must lie in [0, window) = [0, {window}).")
    return np.arange(begin, end - window + 1, stride)


def _move_every(move_every: int | None, *, strategy: Strategy) -> int:
    if move_every is None:
        return 1 if strategy == "random" else 25
    if move_every < 1:
        raise ValueError(f"sde_steps: move_every: got {move_every}, expected at least 1 rollout.")
    return move_every


def _fixed(steps: Sequence[int], *, num_steps: int) -> NDArray[np.int64]:
    if not steps:
        raise ValueError("sde_steps: mode 'fixed' has no steps. List at least one.")
    for step in steps:
        if not 0 <= step < num_steps:
            raise ValueError(
                f"sde_steps: step {step} is not among the {num_steps} steps 0 to {num_steps - 1}. Steps count from 0."
            )
    if len(set(steps)) != len(steps):
        raise ValueError(f"sde_steps: steps {list(steps)} name a step twice. List each once.")
    return np.array(sorted(steps), dtype=np.int64)


def _count(count: int | None, *, pool: int) -> int:
    if count is None or not 1 <= count <= pool:
        raise ValueError(f"sde_steps: count = {count}; mode 'random' needs 1 to {pool}, the size of its pool.")
    return count


def _as_step(value: int | float, *, num_steps: int, name: str) -> int:
    step = math.floor(value * num_steps + _FLOOR_SLACK) if isinstance(value, float) else value
    if not 0 <= step <= num_steps:
        raise ValueError(
            f"sde_steps: {name} = {value} is out of range; an int lies in [0, {num_steps}], a fraction in [0.0, 1.0]."
        )
    return step
