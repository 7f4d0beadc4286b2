"""The train stack: a rollout in, optimizer steps out. Every training backend uses it.

An algorithm provides loss terms, a backend provides backward and step. This module does the rest: mini-batches, the
old-log-prob pass, global loss denominators, exact metrics. No split of the batch changes a gradient, because every
term is divided by its total weight over all micro-batches and ranks, known before the first backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from unirl.core.errors import BatchError
from unirl.core.roles import Metric, TrainReport
from unirl.core.types.track import Track

from ..diffusion.replay import check_stored_steps
from ..loss.reduction import reduce_terms, weight_totals
from ..loss.tally import Tally
from .critic import check_auxiliaries, estimated
from .forwards import ReplayedOnce
from .log_prob_mismatch import MeteredForward, MismatchMeter, metered
from .partition import micro_batches
from .updater import AuxiliaryUpdater, CriticUpdater, FakeScoreUpdater, StepReport, Updater

if TYPE_CHECKING:
    from unirl.core.roles import Algorithm, Forward, Job, Losses
    from unirl.core.specs.config import TrainConfig

__all__ = ["StepReport", "Updater", "train_on"]


def train_on(
    jobs: Sequence[Job],
    *,
    forward: MeteredForward,
    updater: Updater,
    train: TrainConfig,
    progress: float,
    version: int | None = None,
    critic: CriticUpdater | None = None,
    fake_score: FakeScoreUpdater | None = None,
    facts: Mapping[str, float] | None = None,
) -> TrainReport:
    """Train on this rank's samples: `updates_per_step` optimizer steps, each over a share of every job.

    Units (`Track.unit_ids`) stay whole. Those without weight are left out; a rank with fewer than others repeats its
    last one at weight 0, since all ranks must run the same forwards. Old log-probs are recomputed before the first
    update, or where `train` detaches them those of its samples in the very forward pass that the loss differentiates;
    the log-prob mismatch with the engine is measured there, and in the first update if the algorithm's old-log-prob
    pass recomputes nothing.
    jobs: the same ones on every rank. The gradient of a step is the sum of theirs, each times its weight; their losses
    are divided by their own total weights.  train: settings of jobs that bring none.
    progress: fraction of the run that is done, 0 to 1.  version: of the weights being trained; the log-prob mismatch is
    measured on samples of this version only, on all samples if None.  facts: further metrics of the report.
    critic: of an algorithm that trains one; it takes its steps after each step of the policy. Values are computed and
    `after_anchor` runs between the old-log-prob pass and the first update. The policy takes no step in critic warm-up.
    fake_score: of an algorithm that trains one; it takes its steps before each step of the policy, or alone in its
    warm-up.

    Metrics are exact over micro-batches and ranks: the algorithm's own, `loss`, `grad_norm` (mean and `_max`),
    `grad_rms`, `ratio_max_dev_first` (the `ratio_max_dev` of the first update), and `logp_mismatch_max` and
    `logp_mismatch_mean` where the engine gave log-probs; with a critic `critic_loss`, `critic_updates` and its
    optimizer's metrics, such as `critic_grad_norm`, with a fake score `fake_score_loss` and so on. An update whose
    terms all have weight 0 takes no step: `updates_empty` counts them.

    Raises BatchError when the geometry does not fit, such as a unit larger than a micro-batch or jobs of different
    numbers of updates, when the weights of a loss differ from `loss_weights`, and for a critic or a fake score without
    an algorithm that trains it or the other way round; RunFailed, before any step is taken, when the log-prob mismatch
    is beyond either bound or a value of the critic is not finite.
    """
    for job in jobs:
        check_stored_steps(job.track)
    works = [
        _Work(
            job=job,
            train=(settings := job.train or train),
            batches=micro_batches(job.track, settings, updater),
            forward=forward,
            updater=updater,
            progress=progress,
            meter=MismatchMeter(version=version),
            is_detached=settings.detaches(critic=critic is not None, progress=progress),
        )
        for job in jobs
    ]
    updates = {len(work.batches) for work in works}
    if len(updates) != 1:
        raise BatchError(f"train.updates_per_step: got jobs of {sorted(updates)} updates, expected one number for all.")
    check_auxiliaries([job.algorithm for job in jobs], critic=critic, fake_score=fake_score)
    for work in works:
        work.anchor()
    steps, num_empty = list[StepReport](), 0
    before, after = list[_Auxiliary](), list[_Auxiliary]()
    if critic is not None:
        (work,) = works
        work.batches = estimated(work.batches, work.job.algorithm, critic, updater=updater, tally=work.tally)
        after.append(_critic(work, critic))
    if fake_score is not None:
        before.append(_fake_score(works[0], fake_score))
    policy_waits = any(auxiliary.net.is_alone for auxiliary in (*before, *after))
    for number in range(updates.pop()):
        shares = [work.share(number, measures=not steps) for work in works]
        for auxiliary in before:
            auxiliary.train(shares[0], updater=updater)
        if not policy_waits:
            if not _accumulate(shares, into=updater, updater=updater):
                num_empty += 1
                continue
            for work in works:
                work.check()
            steps.append(updater.step())
        for auxiliary in after:
            auxiliary.train(shares[0], updater=updater)
        for work, share in zip(works, shares, strict=True):
            work.merge(share.tally)
    facts = {**(facts or {}), **({"updates_empty": float(num_empty)} if num_empty else {})}
    return _report(works, steps, [*before, *after], facts=facts)


@dataclass(frozen=True, kw_only=True)
class _Share:
    """Contribution of one job to one update."""

    micros: Sequence[Track]
    pieces: Callable[[Track], Sequence[Track]]
    """A micro-batch in the parts that are differentiated one after the other."""
    weights: Callable[[Track], Mapping[str, Tensor]]
    losses: Callable[[Track], Losses]
    scale: float
    tally: Tally = field(default_factory=Tally)
    """Metrics of this update."""
    loss: str = "loss"
    """Name of the loss among the metrics."""


@dataclass(kw_only=True)
class _Work:
    """A job with its micro-batches on this rank, and its measurements."""

    job: Job
    train: TrainConfig
    batches: list[list[Track]]
    """The micro-batches of each update."""
    forward: MeteredForward
    updater: Updater
    progress: float
    meter: MismatchMeter
    is_detached: bool
    """Whether the first update's own forward pass gives its old log-probs."""
    _measures_first: bool = False
    tally: Tally = field(default_factory=Tally)
    first: Tally | None = None
    """Metrics of the first update of the policy alone."""

    def anchor(self) -> None:
        """Compute the old log-probs, on the same micro-batches as the updates: results in bf16 depend on the shape.

        Checks the log-prob mismatch, if that pass replays anything.
        """
        ahead = 1 if self.is_detached else 0
        with metered(self.forward, self.meter, job=self.job):
            self.batches[ahead:] = [
                [_anchored(micro, self.job.algorithm, self.forward, self.updater) for micro in micros]
                for micros in self.batches[ahead:]
            ]
        self._measures_first = self.is_detached or not self.meter.was_called
        self.meter.check(self.train, self.updater)

    def share(self, number: int, *, measures: bool) -> _Share:
        """Its part of an update. measures: it is the first update of the policy."""
        algorithm, meter = self.job.algorithm, self.meter if measures and self._measures_first else None
        is_detached = self.is_detached and number == 0

        def losses(piece: Track) -> Losses:
            with metered(self.forward, meter, job=self.job):
                if not is_detached:
                    return algorithm.loss(piece, self.forward, progress=self.progress)
                forward = ReplayedOnce(self.forward, piece)
                with torch.no_grad():
                    piece = algorithm.with_old_log_probs(piece, forward)
                return algorithm.loss(piece, forward, progress=self.progress)

        is_split = algorithm.separates_steps and self.train.is_serial(str(self.updater.device))
        return _Share(
            micros=self.batches[number],
            pieces=algorithm.pieces if is_split else _whole,
            weights=algorithm.loss_weights,
            losses=losses,
            scale=self.job.weight,
        )

    def check(self) -> None:
        """Check the mismatch measured in the first update, before its step. Collective."""
        if self._measures_first and self.first is None:
            self.meter.check(self.train, self.updater)

    def merge(self, tally: Tally) -> None:
        """Add the metrics of one update."""
        self.first = self.first or tally
        self.tally.merge(tally)

    def metrics(self) -> dict[str, float]:
        """Metrics over all ranks. Collective."""
        self.tally.add(self.meter.metrics())
        metrics = self.tally.reduced(self.updater)
        first = (self.first or Tally()).reduced(self.updater)
        if "ratio_max_dev" in first:
            metrics["ratio_max_dev_first"] = first["ratio_max_dev"]
        return metrics


@dataclass(frozen=True, kw_only=True)
class _Auxiliary:
    """A critic or a fake score, trained on the micro-batches of the policy."""

    name: str
    """`critic` or `fake_score`, the prefix of its metrics."""
    net: AuxiliaryUpdater
    weights: Callable[[Track], Mapping[str, Tensor]]
    losses: Callable[[int, Track], Losses]
    """In the step of this number beside an update of the policy, of a micro-batch."""
    in_use: Callable[[], AbstractContextManager[None]] = nullcontext
    """A context in which it trains."""
    reports: list[StepReport] = field(default_factory=lambda: list[StepReport]())

    def train(self, share: _Share, *, updater: Updater) -> None:
        """Its steps beside an update of the policy, whose share this is."""
        with self.in_use():
            for number in range(self.net.steps_per_update):
                own = replace(
                    share,
                    weights=self.weights,
                    losses=partial(self.losses, number),
                    scale=1.0,
                    loss=f"{self.name}_loss",
                    # The report has the loss before the first of these steps.
                    tally=Tally() if number else share.tally,
                )
                if _accumulate([own], into=self.net, updater=updater):
                    self.reports.append(self.net.step())


def _critic(work: _Work, critic: CriticUpdater) -> _Auxiliary:
    algorithm = work.job.algorithm

    def losses(number: int, micro: Track) -> Losses:
        return algorithm.critic_loss(micro, critic.values(micro), progress=work.progress)

    return _Auxiliary(name="critic", net=critic, weights=algorithm.critic_weights, losses=losses)


def _fake_score(work: _Work, fake_score: FakeScoreUpdater) -> _Auxiliary:
    algorithm, forward = work.job.algorithm, work.forward

    def losses(number: int, micro: Track) -> Losses:
        with metered(forward, None, job=work.job, trains="fake"):
            return algorithm.fake_score_loss(micro, forward, progress=work.progress, repeat=number)

    return _Auxiliary(
        name="fake_score",
        net=fake_score,
        weights=algorithm.fake_score_weights,
        losses=losses,
        in_use=fake_score.in_use,
    )


def _report(
    works: Sequence[_Work],
    policy: Sequence[StepReport],
    auxiliaries: Sequence[_Auxiliary],
    *,
    facts: Mapping[str, float],
) -> TrainReport:
    """The report of these optimizer steps over all ranks. Collective."""
    shared = {**_step_metrics(policy), **facts}
    for auxiliary in auxiliaries:
        name, num_skipped = auxiliary.name, sum(report.skipped for report in auxiliary.reports)
        shared |= {f"{name}_{metric}": value for metric, value in _step_metrics(auxiliary.reports).items()}
        shared[f"{name}_updates"] = float(len(auxiliary.reports) - num_skipped)
        shared[f"{name}_updates_skipped"] = float(num_skipped)
    num_skipped = sum(report.skipped for report in policy)
    return TrainReport(
        metrics={work.job.name: {**work.metrics(), **shared} for work in works},
        num_updates=len(policy) - num_skipped,
        num_skipped=num_skipped,
    )


def _anchored(micro: Track, algorithm: Algorithm, forward: Forward, updater: Updater) -> Track:
    """The micro-batch with its old log-probs, which are where its segment is."""
    with torch.no_grad():
        return micro.computed_on(updater.device, lambda moved: algorithm.with_old_log_probs(moved, forward))


def _whole(micro: Track) -> Sequence[Track]:
    return (micro,)


def _sum(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Weight of each term over the micro-batches of this rank, fp64."""
    totals: dict[str, Tensor] = {}
    for part in parts:
        for name, weight in part.items():
            totals[name] = totals[name] + weight if name in totals else weight
    return totals


def _all_reduced(totals: Mapping[str, Tensor], updater: Updater) -> dict[str, Tensor]:
    """Weight of each term over all ranks. Either all of them have micro-batches or none has."""
    if updater.num_ranks == 1 or not totals:
        return {name: total.cpu() for name, total in totals.items()}
    names = sorted(totals)
    summed = updater.all_reduce_sum(torch.tensor([float(totals[name]) for name in names], dtype=torch.float64))
    return dict(zip(names, summed, strict=True))


def _accumulate(shares: Sequence[_Share], *, into: Updater | AuxiliaryUpdater, updater: Updater) -> bool:
    """Forward and backward of every micro-batch of one update; False, before any of them, when nothing has weight.

    into: the updater whose weights these losses train.  updater: joins the ranks.
    """
    announced = [_sum([weight_totals(share.weights(micro)) for micro in share.micros]) for share in shares]
    totals = [_all_reduced(each, updater) for each in announced]
    if not any(total > 0 for each in totals for total in each.values()):
        return False
    into.zero_grad()
    factor = updater.num_ranks if updater.gradient_reduction == "mean" else 1
    left = sum(len(share.pieces(micro)) for share in shares for micro in share.micros)
    for share, of_share, expected in zip(shares, totals, announced, strict=True):
        weighed: list[Mapping[str, Tensor]] = []
        for piece in (piece for micro in share.micros for piece in share.pieces(micro.to(updater.device))):
            result = share.losses(piece)
            loss = reduce_terms(result.terms, totals=of_share)
            weighed.append(weight_totals(result.terms))
            share.tally.add({**result.metrics, share.loss: Metric(total=loss.detach(), reduce="sum")})
            left -= 1
            into.backward(loss * (factor * share.scale), last=left == 0)
        _check_weights(expected, _sum(weighed))
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
