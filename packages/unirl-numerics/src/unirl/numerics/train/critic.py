"""Networks that train beside the policy: a critic, whose values follow the old-log-prob pass, and a fake score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from unirl.core.errors import BatchError, RunFailed
from unirl.core.roles import Algorithm
from unirl.core.types.track import TextSegment, Track

from .actions import action_mask, per_action, with_per_action

if TYPE_CHECKING:
    from ..loss.tally import Reducer, Tally
    from .updater import CriticUpdater, FakeScoreUpdater, Updater

__all__ = ["check_auxiliaries", "estimated", "with_values"]


def check_auxiliaries(
    algorithms: Sequence[Algorithm], *, critic: CriticUpdater | None, fake_score: FakeScoreUpdater | None
) -> None:
    """Raises BatchError for an algorithm without the critic or the fake score that it trains, for one that is there
    without an algorithm that trains it, and where several algorithms train one model with it."""
    for what, key, kept in (("critic", "critic", critic), ("fake score", "fake_score", fake_score)):
        for algorithm in algorithms:
            is_trained = algorithm.trains_critic if key == "critic" else algorithm.trains_fake_score
            if is_trained and kept is None:
                raise BatchError(
                    f"algorithm: {type(algorithm).__name__} trains a {what}, and the backend keeps none; configure one "
                    f"(fsdp2: backend.{key}.lr)."
                )
            if kept is not None and not is_trained:
                raise BatchError(
                    f"backend: it keeps a {what}, and {type(algorithm).__name__} trains none; leave the {what} out "
                    f"(fsdp2: backend.{key}.lr=null)."
                )
        if kept is not None and len(algorithms) > 1:
            raise BatchError(f"algorithm: a {what} is trained by one job, got {len(algorithms)} jobs of one model.")


def with_values(track: Track, critic: CriticUpdater) -> Track:
    """The track with the critic's value before each action, as `segment.values`. No gradient."""
    with torch.no_grad():
        return with_per_action(track, values=critic.values(track))


def estimated(
    batches: Sequence[Sequence[Track]],
    algorithm: Algorithm,
    critic: CriticUpdater,
    *,
    updater: Updater,
    tally: Tally,
) -> list[list[Track]]:
    """The micro-batches of every update with the critic's values, after `after_anchor` of the algorithm.

    Values are computed on the same micro-batches as the updates; `after_anchor` sees all of them at once. Its metrics
    go to `tally`.

    Raises RunFailed, on every rank, when a value with weight is not finite: whitening would spread one NaN to all
    advantages.
    """
    flat: list[Track] = []
    for micro in (micro for micros in batches for micro in micros):
        home = micro.sample_weights.device
        flat.append(micro.computed_on(updater.device, lambda moved: with_values(moved, critic), home=home))
    if not flat:  # no rank has a row that counts
        return [list(micros) for micros in batches]
    _check_values(flat, updater)
    joined, metrics = algorithm.after_anchor(Track.concat(flat), updater.all_reduce_sum)
    tally.add(metrics)
    back: list[list[Track]] = []
    start = 0
    for micros in batches:
        back.append([])
        for micro in micros:
            back[-1].append(joined.select(range(start, start + micro.num_rows)))
            start += micro.num_rows
    return back


def _check_values(micros: Sequence[Track], ranks: Reducer) -> None:
    bad = next((result for result in map(_bad_value, micros) if result), "")
    if not float(ranks.all_reduce_max(torch.tensor([float(bool(bad))], dtype=torch.float64))[0]):
        return
    raise RunFailed(
        f"critic: {bad or 'a value on another rank is not finite'}; expected finite ones. Lower the critic's learning "
        "rate (backend.critic.lr for fsdp2), or compute it in fp32."
    )


def _bad_value(track: Track) -> str:
    """The first value that counts and is not finite, in words; "" where all are finite."""
    values = per_action(track, "values")
    counts = action_mask(track) & (track.sample_weights > 0)[:, None]
    bad = (counts & ~values.isfinite()).nonzero()
    if not len(bad):
        return ""
    row, column = (int(place) for place in bad[0])
    is_text = isinstance(track.segment, TextSegment)
    action = f"token {column}" if is_text else f"step {int(track.latent.scored_steps[row, column])}"
    where = f"before {action} of sample {track.sample_ids[row]!r} of track {track.name!r}"
    return f"its value is {float(values[row, column])} {where}"
