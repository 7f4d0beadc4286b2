"""The train stack: a rollout in, optimizer steps out. Every training backend uses it.

An algorithm provides loss terms, a backend provides backward and step. This module does the rest: mini-batches, the
old-log-prob pass, global loss denominators, exact metrics. No split of the batch changes a gradient, because every
term is divided by its total weight over all micro-batches and ranks, known before the first backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from unirl.core.errors import BatchError
from unirl.core.match.mismatch_bounds import MismatchBounds
from unirl.core.roles import Metric, TrainReport
from unirl.core.types.batch import rows_by_group
from unirl.core.types.track import Status, TextSegment, Track

from ..loss.reduction import reduce_terms, weight_totals
from ..loss.tally import Tally
from ..tokens.batches import TokenLoad, micro_batches_by_tokens
from .critic import critic_pair, estimated
from .log_prob_mismatch import MeteredForward, MismatchMeter, metered
from .updater import CriticUpdater, StepReport, Updater

if TYPE_CHECKING:
    from unirl.core.roles import Algorithm, CriticAlgorithm, Forward, Losses
    from unirl.core.specs.config import TrainConfig

__all__ = ["StepReport", "UpdateSettings", "Updater", "mini_batches", "train_on"]


@dataclass(frozen=True, kw_only=True)
class UpdateSettings:
    """How a rollout is divided into updates and micro-batches."""

    updates: int = 1
    """Optimizer steps per rollout, with equal shares of the samples; `mini_batches` divides them."""
    micro_batch_size: int = 0
    """Samples per forward and backward; 0 takes a whole mini-batch. A rank with fewer micro-batches than others repeats
    its smallest unit at weight 0."""
    micro_batch_tokens: int = 0
    """For text tracks, tokens per forward and backward instead, prompts included; 0 counts samples."""
    packing: bool = True
    """Pack completions without padding; without packing, padding counts towards `micro_batch_tokens`."""
    mismatch_bounds: MismatchBounds = field(default_factory=MismatchBounds)
    """Bounds on |engine log-prob - recomputed log-prob| over a rollout."""
    version: int | None = None
    """Version of the weights being trained. Mismatch is measured only on samples of this version; None takes all."""

    @classmethod
    def of(cls, train: TrainConfig, *, version: int) -> UpdateSettings:
        """As the plan says, for weights of this version."""
        return cls(
            updates=train.updates_per_step,
            micro_batch_size=train.micro_batch_size,
            micro_batch_tokens=train.micro_batch_tokens,
            packing=train.packing,
            mismatch_bounds=MismatchBounds(largest=train.logp_mismatch_max, mean=train.logp_mismatch_mean),
            version=version,
        )


def train_on(
    track: Track,
    algorithm: Algorithm,
    *,
    forward: MeteredForward,
    updater: Updater,
    settings: UpdateSettings,
    progress: float,
    critic: CriticUpdater | None = None,
) -> TrainReport:
    """Train on this rank's samples: `settings.updates` optimizer steps.

    Units (`Track.unit_ids`) stay whole. Those without weight are left out; a rank with fewer than others repeats its
    last one at weight 0, since all ranks must run the same forwards. Old log-probs are recomputed before the first
    update, and the log-prob mismatch with the engine is measured there, or in the first update if the algorithm's
    old-log-prob pass recomputes nothing.
    progress: fraction of the run that is done, 0 to 1.
    critic: for a `CriticAlgorithm`, whose critic takes a step after each step of the policy. Values are computed and
    `after_anchor` runs between the old-log-prob pass and the first update. The policy takes no step in critic warm-up.

    Metrics are exact over micro-batches and ranks: the algorithm's own, `loss`, `grad_norm` (mean and `_max`),
    `grad_rms`, `ratio_max_dev_first` (the `ratio_max_dev` of the first update), and `logp_mismatch_max` and
    `logp_mismatch_mean` where the engine gave log-probs; with a critic `critic_loss`, `critic_updates` and its
    optimizer's metrics, such as `critic_grad_norm`. An update whose terms all have weight 0 takes no step:
    `updates_empty` counts them.

    Raises BatchError when the geometry does not fit, such as a unit larger than a micro-batch, when the weights of a
    loss differ from `loss_weights`, and for a critic without an algorithm that trains one or the other way round;
    RunFailed, before any step is taken, when the log-prob mismatch is beyond either bound or a value of the critic is
    not finite.
    """
    trained_critic = critic_pair(algorithm, critic)
    batches = _micro_batches(track, settings, updater)
    meter, bounds = MismatchMeter(version=settings.version), settings.mismatch_bounds
    with metered(forward, meter):
        batches = recompute_old_log_probs(batches, algorithm, forward, updater)
    measures_first = not meter.was_called
    meter.check(bounds, updater)
    log, policy_waits = _UpdateLog(), critic is not None and critic.is_alone
    if trained_critic is not None:
        batches = estimated(batches, *trained_critic, updater=updater, tally=log.tally)
    for micros in batches:
        tally = Tally()
        if not policy_waits:
            measuring = meter if measures_first and not log.policy else None
            with metered(forward, measuring):
                report = policy_update(
                    micros, algorithm, forward, bounds=bounds, progress=progress, updater=updater, tally=tally
                )
            if report is None:
                log.num_empty += 1
                continue
            log.add_policy(report, tally)
        if trained_critic is not None:
            report = critic_update(micros, *trained_critic, progress=progress, updater=updater, tally=tally)
            log.critic += [] if report is None else [report]
        log.tally.merge(tally)
    log.tally.add(meter.metrics())
    return log.report(updater, has_critic=critic is not None)


def recompute_old_log_probs(
    batches: Sequence[Sequence[Track]], algorithm: Algorithm, forward: Forward, updater: Updater
) -> list[list[Track]]:
    """The micro-batches of every update with old log-probs, from the algorithm's old-log-prob pass.

    It runs on the same micro-batches as the updates, because results in bf16 depend on the batch's shape.
    """
    return [[_anchored(micro, algorithm, forward, updater) for micro in micros] for micros in batches]


def policy_update(
    micros: Sequence[Track],
    algorithm: Algorithm,
    forward: MeteredForward,
    *,
    bounds: MismatchBounds,
    progress: float,
    updater: Updater,
    tally: Tally,
) -> StepReport | None:
    """One optimizer step of the policy on these micro-batches; None, and no step, if nothing has weight.

    forward: its meter, if it has one, is checked against `bounds` before the step.  tally: takes the metrics.
    """

    def losses(micro: Track) -> Losses:
        return algorithm.loss(micro, forward, progress=progress)

    if not _accumulate(micros, algorithm.loss_weights, losses, into=updater, updater=updater, tally=tally):
        return None
    if forward.meter is not None:
        forward.meter.check(bounds, updater)
    return updater.step()


def critic_update(
    micros: Sequence[Track],
    algorithm: CriticAlgorithm,
    critic: CriticUpdater,
    *,
    progress: float,
    updater: Updater,
    tally: Tally,
) -> StepReport | None:
    """One optimizer step of the critic on these micro-batches; None, and no step, if nothing has weight.

    updater: joins the ranks.  tally: takes the metrics.
    """

    def losses(micro: Track) -> Losses:
        return algorithm.critic_loss(micro, critic.values(micro), progress=progress)

    if not _accumulate(
        micros, algorithm.critic_weights, losses, into=critic, updater=updater, tally=tally, name="critic_loss"
    ):
        return None
    return critic.step()


@dataclass
class _UpdateLog:
    """The updates so far and their metrics."""

    tally: Tally = field(default_factory=Tally)
    first: Tally = field(default_factory=Tally)
    """Of the first update of the policy alone."""
    policy: list[StepReport] = field(default_factory=lambda: list[StepReport]())
    critic: list[StepReport] = field(default_factory=lambda: list[StepReport]())
    num_empty: int = 0

    def add_policy(self, report: StepReport, tally: Tally) -> None:
        self.first = self.first if self.policy else tally
        self.policy.append(report)

    def report(self, updater: Updater, *, has_critic: bool) -> TrainReport:
        """Over all ranks. Collective."""
        metrics = self.tally.reduced(updater)
        first = self.first.reduced(updater)
        if "ratio_max_dev" in first:
            metrics["ratio_max_dev_first"] = first["ratio_max_dev"]
        metrics.update(_step_metrics(self.policy))
        if self.num_empty:
            metrics["updates_empty"] = float(self.num_empty)
        if has_critic:
            stepped = sum(not report.skipped for report in self.critic)
            metrics.update({f"critic_{name}": value for name, value in _step_metrics(self.critic).items()})
            metrics["critic_updates"] = float(stepped)
            metrics["critic_updates_skipped"] = float(len(self.critic) - stepped)
        num_skipped = sum(report.skipped for report in self.policy)
        return TrainReport(metrics=metrics, num_updates=len(self.policy) - num_skipped, num_skipped=num_skipped)


def mini_batches(group_ids: Sequence[str], updates: int, *, sizes: Sequence[int] | None = None) -> list[list[int]]:
    """Indices of the units of each update: every group is partitioned over the updates, the next to the smallest.

    group_ids: group of each unit.  sizes: rows of each unit; 1 if None.
    The updates' rows differ by at most the largest unit. With units of one size it is round-robin, and the shares of a
    group differ by at most one unit. If units per group are then a multiple of `updates`, a unit's update depends only
    on its place in its group, so any number of ranks makes the same updates. Units keep their order within an update;
    with one update the batch is unchanged.
    """
    partition: list[list[int]] = [[] for _ in range(updates)]
    filled = [0] * updates
    for unit in (unit for units in rows_by_group(group_ids).values() for unit in units):
        smallest = filled.index(min(filled))
        partition[smallest].append(unit)
        filled[smallest] += 1 if sizes is None else sizes[unit]
    return [sorted(units) for units in partition]


def micro_batches_by_rows(units: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """Rows of each micro-batch: consecutive units, at most `size` rows unless one unit has more; 0 is no limit."""
    batches: list[list[int]] = []
    for rows in units:
        if batches and (not size or len(batches[-1]) + len(rows) <= size):
            batches[-1].extend(rows)
        else:
            batches.append(list(rows))
    return [sorted(batch) for batch in batches]


def _micro_batches(track: Track, settings: UpdateSettings, updater: Updater) -> list[list[Track]]:
    """The micro-batches of each update, units whole; as many on every rank."""
    _check_geometry(track, settings)
    kept = _kept(track, settings, updater)
    units = kept.units()
    groups = [kept.group_ids[rows[0]] for rows in units]
    partition = mini_batches(groups, settings.updates, sizes=[len(rows) for rows in units])
    updates = [_divided(kept, [units[unit] for unit in part], settings) for part in partition]
    counts = updater.all_reduce_max(torch.tensor([len(micros) for micros in updates], dtype=torch.float64))
    missing = [int(count) - len(micros) for count, micros in zip(counts, updates, strict=True)]
    fillers = iter(_fillers(kept, sum(missing)))
    return [
        [*(kept.select(rows) for rows in micros), *islice(fillers, count)]
        for micros, count in zip(updates, missing, strict=True)
    ]


def _check_geometry(track: Track, settings: UpdateSettings) -> None:
    updates, micro_batch_size = settings.updates, settings.micro_batch_size
    num_units = sum(any(track.status[row] is not Status.PADDING for row in rows) for rows in track.units())
    if micro_batch_size < 0:
        raise BatchError(
            f"train.micro_batch_size: got {micro_batch_size}, expected 0 (a whole mini-batch) or samples per forward."
        )
    if updates < 1:
        raise BatchError(f"train.updates_per_step: got {updates}, expected 1 or more.")
    if updates > max(num_units, 1):
        noun = "samples" if track.unit_ids is None else "units"
        raise BatchError(
            f"train.updates_per_step: got {updates} updates, but this rank has {num_units} {noun} of track "
            f"{track.name!r}, and each update needs one. Sample more, or use {max(num_units, 1)} updates or fewer."
        )
    if settings.micro_batch_tokens and not isinstance(track.segment, TextSegment):
        raise BatchError(
            f"train.micro_batch_tokens: got {settings.micro_batch_tokens}; track {track.name!r} is not a text track. "
            "Use train.micro_batch_size."
        )


def _kept(track: Track, settings: UpdateSettings, updater: Updater) -> Track:
    """The units that have a row with weight; equally many on every rank."""
    units = track.units()
    counted = [rows for rows in units if any(float(track.sample_weights[row]) != 0 for row in rows)]
    problem = _oversized(track, counted, settings)
    # Also the negative minimum of the rows: a rank without any, or with a unit that does not fit, is seen by all
    # instead of hanging the others.
    sizes = updater.all_reduce_max(torch.tensor([len(counted), -track.num_rows, bool(problem)], dtype=torch.float64))
    most, has_rows, fits = int(sizes[0]), int(sizes[1]) < 0, not int(sizes[2])
    if not has_rows:
        raise BatchError(
            f"Track {track.name!r}: a rank has no rows at all; give every rank at least one, if only as padding."
        )
    if not fits:
        raise BatchError(problem or f"Track {track.name!r}: another rank has a unit larger than a micro-batch.")
    if most and not counted:
        return track.padding(units[0], copies=most)
    kept = track.select(sorted(row for rows in counted for row in rows))
    return kept.padded(kept.num_rows + (most - len(counted)) * len(kept.units()[-1])) if counted else kept


def _oversized(track: Track, units: Sequence[Sequence[int]], settings: UpdateSettings) -> str:
    """Why a unit of several rows fits in no micro-batch; "" if all fit."""
    if track.unit_ids is None:
        return ""
    for rows in units:
        if settings.micro_batch_tokens:
            key, limit, noun = "micro_batch_tokens", settings.micro_batch_tokens, "tokens"
            load = TokenLoad.of([track.text.total_lengths[row] for row in rows])
            size = load.tokens(padded=not settings.packing)
        else:
            key, limit, size, noun = "micro_batch_size", settings.micro_batch_size, len(rows), "rows"
        if len(rows) > 1 and limit and size > limit:
            return (
                f"train.{key}: got {limit}, but unit {track.unit_ids[rows[0]]!r} of track {track.name!r} has {size} "
                f"{noun}, and a unit is never split. Use {size} or more."
            )
    return ""


def _divided(track: Track, units: Sequence[Sequence[int]], settings: UpdateSettings) -> list[list[int]]:
    """Rows of each micro-batch of one update that trains on these units."""
    if not settings.micro_batch_tokens:
        return micro_batches_by_rows(units, settings.micro_batch_size)
    lengths, budget = track.text.total_lengths, settings.micro_batch_tokens
    return micro_batches_by_tokens(lengths, budget, units=units, padded=not settings.packing)


def _fillers(track: Track, count: int) -> list[Track]:
    """Micro-batches of weight 0: copies of the unit with the fewest tokens, or rows."""
    if not count:
        return []
    costs = track.text.total_lengths if isinstance(track.segment, TextSegment) else (1,) * track.num_rows
    smallest = min(track.units(), key=lambda rows: sum(costs[row] for row in rows))
    return track.padding(smallest, copies=count).chunks(len(smallest))


def _anchored(micro: Track, algorithm: Algorithm, forward: Forward, updater: Updater) -> Track:
    """The micro-batch with its old log-probs, moved back to the device that it came from."""
    home = micro.sample_weights.device
    with torch.no_grad():
        return algorithm.with_old_log_probs(micro.to(updater.device), forward).to(home)


def _sum(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Weight of each term over the micro-batches of this rank, fp64 on the CPU."""
    totals: dict[str, Tensor] = {}
    for part in parts:
        for name, weight in part.items():
            totals[name] = totals.get(name, torch.zeros((), dtype=torch.float64)) + weight.cpu()
    return totals


def _all_reduced(totals: Mapping[str, Tensor], updater: Updater) -> dict[str, Tensor]:
    """Weight of each term over all ranks. Either all of them have micro-batches or none has."""
    if updater.num_ranks == 1 or not totals:
        return dict(totals)
    names = sorted(totals)
    summed = updater.all_reduce_sum(torch.tensor([float(totals[name]) for name in names], dtype=torch.float64))
    return dict(zip(names, summed, strict=True))


def _accumulate(
    micros: Sequence[Track],
    weights: Callable[[Track], Mapping[str, Tensor]],
    losses: Callable[[Track], Losses],
    *,
    into: Updater | CriticUpdater,
    updater: Updater,
    tally: Tally,
    name: str = "loss",
) -> bool:
    """Forward and backward of every micro-batch of one update; False, before any of them, when nothing has weight.

    into: the updater whose weights these losses train.  name: of the loss in the log.
    """
    announced = _sum([weight_totals(weights(micro)) for micro in micros])
    totals = _all_reduced(announced, updater)
    if not any(total > 0 for total in totals.values()):
        return False
    into.zero_grad()
    factor = updater.num_ranks if updater.gradient_reduction == "mean" else 1
    weighed: list[Mapping[str, Tensor]] = []
    for number, micro in enumerate(micros, start=1):
        result = losses(micro.to(updater.device))
        terms = result.terms
        loss = reduce_terms(terms, totals=totals)
        weighed.append(weight_totals(terms))
        tally.add({**result.metrics, name: Metric(total=float(loss.detach()), reduce="sum")})
        into.backward(loss * factor, last=number == len(micros))
    _check_weights(announced, _sum(weighed))
    return True


def _check_weights(announced: Mapping[str, Tensor], weighed: Mapping[str, Tensor]) -> None:
    expected, result = ({name: float(weight) for name, weight in part.items()} for part in (announced, weighed))
    # 1e-5: the weights are fp32, and may be summed on another device in another order.
    if expected.keys() != result.keys() or any(
        not math.isclose(expected[name], result[name], rel_tol=1e-5, abs_tol=1e-12) for name in expected
    ):
        raise BatchError(
            f"algorithm: loss_weights() announced {expected}, the terms of loss() weigh {result}. They must be equal, "
            "or the gradient depends on the batching."
        )


def _step_metrics(reports: Sequence[StepReport]) -> dict[str, float]:
    """Means over the updates that stepped; a skipped one has no norm worth a mean."""
    stepped = [report for report in reports if not report.skipped]
    if not stepped:
        return {}
    metrics = {
        "grad_norm": sum(report.grad_norm for report in stepped) / len(stepped),
        "grad_norm_max": max(report.grad_norm for report in stepped),
        "grad_rms": sum(report.grad_rms for report in stepped) / len(stepped),
    }
    for name in stepped[0].metrics:
        metrics[name] = sum(report.metrics[name] for report in stepped) / len(stepped)
    return metrics
