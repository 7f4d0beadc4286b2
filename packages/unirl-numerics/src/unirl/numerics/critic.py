"""What the train stack does for an algorithm with a critic: values after the anchor pass, and the critic's updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from unirl.core.errors import BatchError
from unirl.core.roles import Algorithm, CriticAlgorithm
from unirl.core.track import Track

from .text_replay import per_sample

if TYPE_CHECKING:
    from .stack import StepReport, Updater
    from .tally import Tally

__all__ = ["CriticUpdater", "critic_algorithm", "estimated", "with_values"]


class CriticUpdater(Protocol):
    """What a backend that keeps a critic does for the stack, besides `Updater`. Called as often on every rank."""

    @property
    def is_alone(self) -> bool:
        """The policy waits while the critic warms up: it takes no step in this call of `train_on`."""
        ...

    def values(self, track: Track) -> Tensor:
        """[n, S] fp32 before each token of these rows, with gradient unless in no_grad; see `replay_values`."""
        ...

    def zero_grad(self) -> None: ...
    def backward(self, loss: Tensor, *, last: bool) -> None:
        """As `Updater.backward`, for the critic's own weights."""
        ...

    def step(self) -> StepReport: ...


def critic_algorithm(algorithm: Algorithm, critic: CriticUpdater | None) -> CriticAlgorithm | None:
    """The algorithm, where it trains a critic. Raises BatchError where one of the two is there without the other."""
    found = algorithm if isinstance(algorithm, CriticAlgorithm) else None
    if found is not None and critic is None:
        raise BatchError(
            f"algorithm: {type(algorithm).__name__} trains a critic, and the backend keeps none; give it one, for "
            "fsdp2 by backend.critic.lr."
        )
    if found is None and critic is not None:
        raise BatchError(
            f"backend: it keeps a critic, and {type(algorithm).__name__} trains none; leave the critic out, for fsdp2 "
            "by backend.critic.lr=null."
        )
    return found


def with_values(track: Track, critic: CriticUpdater) -> Track:
    """The track with what the critic expects before each token, as `segment.values`. No gradient."""
    with torch.no_grad():
        found = critic.values(track)
    return dataclasses.replace(track, segment=dataclasses.replace(track.text, values=per_sample(found, track.text)))


def estimated(
    batches: Sequence[Sequence[Track]],
    algorithm: CriticAlgorithm,
    critic: CriticUpdater,
    *,
    apply: Updater,
    tally: Tally,
) -> list[list[Track]]:
    """The anchored micro-batches of every update with values, and with what `after_anchor` made of them.

    The values come of the very micro-batches of the updates; `after_anchor` sees all of them at once. Its numbers go to
    `tally`.
    """
    flat: list[Track] = []
    for micro in (micro for micros in batches for micro in micros):
        flat.append(with_values(micro.to(apply.device), critic).to(micro.weights.device))
    if not flat:  # no rank has a row that counts
        return [list(micros) for micros in batches]
    joined, metrics = algorithm.after_anchor(Track.concat(flat), apply.all_reduce_sum)
    tally.add(metrics)
    back: list[list[Track]] = []
    start = 0
    for micros in batches:
        back.append([])
        for micro in micros:
            back[-1].append(joined.select(range(start, start + micro.num_rows)))
            start += micro.num_rows
    return back
