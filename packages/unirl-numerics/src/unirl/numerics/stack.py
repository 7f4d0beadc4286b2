"""The train stack: one rollout's rows in, optimizer steps out. Every training backend runs this one.

An algorithm gives loss terms, a backend gives backward and step; what lies between is here: which rows form an update,
the anchor pass, the global denominators, exact metrics. No split of the rows changes a gradient, because every term is
divided by its weight over all micro-batches and ranks, known before the first backward.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import torch
from torch import Tensor
from unirl.core.errors import BatchError
from unirl.core.gap_bounds import GapBounds
from unirl.core.roles import Metric, TrainReport
from unirl.core.track import Status, TextSegment, Track

from .critic import CriticUpdater, critic_algorithm, estimated
from .log_prob_gap import GapMeter
from .reduction import LossTerm, reduce_terms, weight_totals
from .tally import Tally
from .token_batches import micro_batches_by_tokens

if TYPE_CHECKING:
    from unirl.core.roles import Algorithm, CriticAlgorithm, Losses, Replay

__all__ = ["StepReport", "Updater", "mini_batches", "train_on"]


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one optimizer step did."""

    grad_norm: float
    """Of all gradients over all ranks, before clipping."""
    grad_rms: float
    """Root mean square of the gradient elements that the optimizer was given, after clipping."""
    skipped: bool = False
    """A gradient was not finite, so the weights were left as they are."""
    metrics: Mapping[str, float] = field(default_factory=lambda: dict[str, float]())
    """Further numbers of this step, averaged over the updates."""


class Updater(Protocol):
    """What a backend does for the stack. Every method is called equally often, in the same order, on every rank."""

    @property
    def device(self) -> Any:
        """Where micro-batches are to be."""
        ...

    @property
    def num_ranks(self) -> int:
        """Ranks that hold different rows."""
        ...

    @property
    def gradient_reduction(self) -> Literal["mean", "sum"]:
        """How gradients of the ranks are joined. FSDP and DDP average, so the loss is multiplied by the ranks."""
        ...

    def zero_grad(self) -> None: ...
    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of `loss`. `last` is the last micro-batch of an update: gradients are then complete."""
        ...

    def step(self) -> StepReport: ...
    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """values: fp64 on the CPU. Returns their sum over the ranks, fp64 on the CPU."""
        ...

    def all_reduce_max(self, values: Tensor) -> Tensor:
        """values: fp64 on the CPU. Returns their maximum over the ranks, fp64 on the CPU."""
        ...


def train_on(
    track: Track,
    algorithm: Algorithm,
    *,
    replay: Replay,
    updates: int,
    micro_batch: int,
    progress: float,
    apply: Updater,
    logp_gap_max: float | None = None,
    logp_gap_mean: float | None = None,
    version: int | None = None,
    micro_batch_tokens: int = 0,
    packing: bool = True,
    critic: CriticUpdater | None = None,
) -> TrainReport:
    """Train on the rows of this rank: `updates` optimizer steps of equal share.

    Rows of weight 0 are left out; a rank with fewer rows than others repeats its last one at weight 0, for all ranks
    must run the same forwards. `mini_batches` says which rows form an update.
    micro_batch: rows per forward and backward; 0 takes a whole mini-batch.
    micro_batch_tokens: of text tracks, tokens per forward and backward in its place, prompts included, counted with
    padding unless `packing`; 0 counts rows. A rank with fewer such micro-batches repeats its shortest row at weight 0.
    The algorithm's anchor pass runs on the very micro-batches of the updates, before the first of them, because
    results in bf16 depend on the batch's shape.
    logp_gap_max, logp_gap_mean: bounds of |log-prob of the engine - of the replay|, of any and of the mean over all;
    None is none. The gap is measured in the anchor pass, or in the first update where the anchor replays nothing.
    critic: for a `CriticAlgorithm`, whose critic takes a step after each of the policy's. Its values and its
    `after_anchor` come between the anchor pass and the first update. While it warms up the policy takes no step.
    version: of the weights that train. The gap is measured on samples of these weights alone; None takes all samples.

    Metrics are exact over micro-batches and ranks: the algorithm's own, `loss`, `grad_norm` (mean and `_max`),
    `grad_rms`, `ratio_max_dev_first` (the `ratio_max_dev` of the first update), and `logp_gap_max` and `logp_gap_mean`
    where the engine gave log-probs; of a critic `critic_loss`, `critic_updates` and what its optimizer says, as
    `critic_grad_norm` and so on. An update whose terms all weigh nothing takes no step: `updates_empty` counts them.

    Raises BatchError when the geometry does not fit, when the weights of a loss differ from what `weights` said, and
    when there is a critic without an algorithm for it or the other way round; RunFailed when the engine's log-probs are
    off by more than either bound, before any step is taken.
    """
    judge = critic_algorithm(algorithm, critic)
    _check_geometry(track, updates=updates, micro_batch=micro_batch)
    kept, dealt = _dealt(track, updates=updates, apply=apply)
    batches = [kept.select(rows).chunks(micro_batch) if rows else [] for rows in dealt]
    if micro_batch_tokens:
        batches = _by_tokens(kept, dealt, budget=micro_batch_tokens, packing=packing, apply=apply)
    meter, bounds = GapMeter(replay, version=version), GapBounds(largest=logp_gap_max, mean=logp_gap_mean)
    batches = [[_anchored(micro, algorithm, meter, apply) for micro in micros] for micros in batches]
    measures_first = not meter.was_called
    meter.check(bounds, apply)

    everything, first, reports, critic_reports = Tally(), Tally(), list[StepReport](), list[StepReport]()
    num_empty, waits = 0, critic is not None and critic.is_alone
    if judge is not None and critic is not None:
        batches = estimated(batches, judge, critic, apply=apply, tally=everything)
    for micros in batches:
        tally = Tally()
        if not waits:
            through = meter if not reports and measures_first else replay

            def losses(there: Track, through: Replay = through) -> Losses:
                return algorithm.loss(there, through, progress=progress)

            accumulated = _accumulate(micros, algorithm.weights, losses, into=apply, apply=apply, tally=tally)
            if not accumulated:
                num_empty += 1
                continue
            if through is meter:
                meter.check(bounds, apply)
            first = first if reports else tally
            reports.append(apply.step())
        if judge is not None and critic is not None:

            def critic_losses(there: Track, judge: CriticAlgorithm = judge, critic: CriticUpdater = critic) -> Losses:
                return judge.critic_loss(there, critic.values(there), progress=progress)

            if _accumulate(
                micros, judge.critic_weights, critic_losses, into=critic, apply=apply, tally=tally, name="critic_loss"
            ):
                critic_reports.append(critic.step())
        everything.merge(tally)

    everything.add(meter.metrics())
    metrics = everything.reduced(apply)
    first_metrics = first.reduced(apply)
    if "ratio_max_dev" in first_metrics:
        metrics["ratio_max_dev_first"] = first_metrics["ratio_max_dev"]
    metrics.update(_step_metrics(reports))
    if num_empty:
        metrics["updates_empty"] = float(num_empty)
    if critic is not None:
        stepped = sum(not report.skipped for report in critic_reports)
        metrics.update({f"critic_{name}": value for name, value in _step_metrics(critic_reports).items()})
        metrics["critic_updates"] = float(stepped)
        metrics["critic_updates_skipped"] = float(len(critic_reports) - stepped)
    num_skipped = sum(report.skipped for report in reports)
    return TrainReport(metrics=metrics, num_updates=len(reports) - num_skipped, num_skipped=num_skipped)


def mini_batches(group_ids: Sequence[str], updates: int) -> list[list[int]]:
    """Rows of each update: every group is dealt over the updates in turn, so each gets its share of every group.

    Sizes differ by one at most; so do the shares of a group. A row's place depends on its place in its group alone
    where group sizes are multiples of `updates`: any number of ranks then makes the same updates. Rows keep their
    order within an update, and one update is the batch as it stands.
    """
    dealt: list[list[int]] = [[] for _ in range(updates)]
    groups: dict[str, list[int]] = {}
    for row, group in enumerate(group_ids):
        groups.setdefault(group, []).append(row)
    for place, row in enumerate(row for rows in groups.values() for row in rows):
        dealt[place % updates].append(row)
    return [sorted(rows) for rows in dealt]


def _check_geometry(track: Track, *, updates: int, micro_batch: int) -> None:
    num_rows = sum(status is not Status.PADDING for status in track.status)
    if micro_batch < 0:
        raise BatchError(
            f"train.micro_batch: {micro_batch} was asked for; it must be 0 (a whole mini-batch) or the rows of a "
            "forward."
        )
    if updates < 1:
        raise BatchError(f"train.updates_per_step: {updates} was asked for; it must be 1 or more.")
    if updates > max(num_rows, 1):
        raise BatchError(
            f"train.updates_per_step: {updates} updates were asked for; this rank has {num_rows} samples of track "
            f"{track.name!r}, and each update needs one. Sample more, or use {max(num_rows, 1)} updates or fewer."
        )


def _dealt(track: Track, *, updates: int, apply: Updater) -> tuple[Track, list[list[int]]]:
    """The rows that count, and those of each update; as many on every rank."""
    counted = [row for row in range(track.num_rows) if float(track.weights[row]) != 0]
    # Also the negative minimum, so that a rank without rows is seen by all instead of hanging the others.
    sizes = apply.all_reduce_max(torch.tensor([len(counted), -track.num_rows], dtype=torch.float64))
    most, has_rows = int(sizes[0]), int(sizes[1]) < 0
    if not has_rows:
        raise BatchError(
            f"Track {track.name!r}: a rank has no rows at all; give every rank at least one, padding will do."
        )
    if counted or not most:
        kept = track.select(counted).padded(most)
    else:
        empty = track.select([0])
        kept = dataclasses.replace(empty, weights=empty.weights * 0, status=(Status.PADDING,)).repeat(most)
    return kept, mini_batches(kept.group_ids, updates)


def _by_tokens(
    track: Track, dealt: Sequence[Sequence[int]], *, budget: int, packing: bool, apply: Updater
) -> list[list[Track]]:
    """The micro-batches of each update, none above `budget` tokens unless it is one row; as many on every rank."""
    if not isinstance(track.segment, TextSegment):
        raise BatchError(
            f"train.micro_batch_tokens: {budget} was asked for; track {track.name!r} is no text. Use train.micro_batch."
        )
    lengths = track.segment.total_lengths

    def split(rows: Sequence[int]) -> list[list[int]]:
        micros = micro_batches_by_tokens([lengths[row] for row in rows], budget, padded=not packing)
        return [[rows[place] for place in micro] for micro in micros]

    updates = [split(rows) for rows in dealt]
    most = apply.all_reduce_max(torch.tensor([len(micros) for micros in updates], dtype=torch.float64))
    shortest = min(range(track.num_rows), key=lengths.__getitem__)
    filler = track.select([shortest])
    filler = dataclasses.replace(filler, weights=filler.weights * 0, status=(Status.PADDING,))
    return [
        [*(track.select(rows) for rows in micros), *[filler] * (int(count) - len(micros))]
        for micros, count in zip(updates, most, strict=True)
    ]


def _anchored(micro: Track, algorithm: Algorithm, replay: Replay, apply: Updater) -> Track:
    """The micro-batch with what the updates compare with, back where its tensors were."""
    home = micro.weights.device
    with torch.no_grad():
        return algorithm.anchor(micro.to(apply.device), replay).to(home)


def _sum(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Weight of each term over the micro-batches of this rank, fp64 on the CPU."""
    totals: dict[str, Tensor] = {}
    for part in parts:
        for name, weight in part.items():
            totals[name] = totals.get(name, torch.zeros((), dtype=torch.float64)) + weight.cpu()
    return totals


def _over_ranks(totals: Mapping[str, Tensor], apply: Updater) -> dict[str, Tensor]:
    """Weight of each term over all ranks. They all have micro-batches, or none has."""
    if apply.num_ranks == 1 or not totals:
        return dict(totals)
    names = sorted(totals)
    summed = apply.all_reduce_sum(torch.tensor([float(totals[name]) for name in names], dtype=torch.float64))
    return dict(zip(names, summed, strict=True))


def _accumulate(
    micros: Sequence[Track],
    weights: Callable[[Track], Mapping[str, Tensor]],
    losses: Callable[[Track], Losses],
    *,
    into: Updater | CriticUpdater,
    apply: Updater,
    tally: Tally,
    name: str = "loss",
) -> bool:
    """Forward and backward of every micro-batch of one update; False, before any of them, when nothing has weight.

    into: whose weights these losses train.  name: of the loss in the log.
    """
    announced = _sum([weight_totals(weights(micro)) for micro in micros])
    totals = _over_ranks(announced, apply)
    if not any(total > 0 for total in totals.values()):
        return False
    into.zero_grad()
    factor = apply.num_ranks if apply.gradient_reduction == "mean" else 1
    found: list[Mapping[str, Tensor]] = []
    for number, micro in enumerate(micros, start=1):
        told = losses(micro.to(apply.device))
        terms = cast("Sequence[LossTerm]", told.terms)
        loss = reduce_terms(terms, totals=totals)
        found.append(weight_totals(terms))
        tally.add({**told.metrics, name: Metric(total=float(loss.detach()), reduce="sum")})
        into.backward(loss * factor, last=number == len(micros))
    _check_weights(announced, _sum(found))
    return True


def _check_weights(said: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    # 1e-5: the weights are fp32, and may be summed on another device in another order.
    if said.keys() != found.keys() or any(
        not math.isclose(float(said[name]), float(found[name]), rel_tol=1e-5, abs_tol=1e-12) for name in said
    ):
        raise BatchError(
            f"algorithm: weights() announced { {n: float(w) for n, w in said.items()} }, the terms of loss() weigh "
            f"{ {n: float(w) for n, w in found.items()} }. They must be equal, or the gradient depends on the batching."
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
