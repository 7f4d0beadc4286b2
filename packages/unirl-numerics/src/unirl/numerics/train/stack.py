"""The train stack: a rollout in, optimizer steps out. Every training backend uses it.

An algorithm provides loss terms, a backend provides backward and step. This module does the rest: mini-batches, the
old-log-prob pass, global loss denominators, exact metrics. No split of the batch changes a gradient, because every
term is divided by its total weight over all micro-batches and ranks, known before the first backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from unirl.core.errors import BatchError
from unirl.core.match.mismatch_bounds import MismatchBounds
from unirl.core.roles import Metric, TrainReport
from unirl.core.types.track import Track

from ..loss.reduction import reduce_terms, weight_totals
from ..loss.tally import Tally
from .critic import critic_pair, estimated
from .log_prob_mismatch import MeteredForward, MismatchMeter, metered
from .partition import UpdateSettings, micro_batches
from .updater import CriticUpdater, StepReport, Updater

if TYPE_CHECKING:
    from unirl.core.roles import Algorithm, CriticAlgorithm, Forward, Losses

__all__ = ["StepReport", "UpdateSettings", "Updater", "train_on"]


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
    batches = micro_batches(track, settings, updater)
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
