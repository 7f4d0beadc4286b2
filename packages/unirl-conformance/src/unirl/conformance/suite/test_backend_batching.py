"""The partition of rows over micro-batches, updates and ranks does not change the update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor
from unirl.conformance.claims import claim
from unirl.conformance.doubles.ppo import DPO, PPO
from unirl.conformance.doubles.tiny_decoder import TinyDecoder
from unirl.conformance.doubles.tiny_denoiser import TinyDenoiser
from unirl.conformance.doubles.tiny_unified import TinyUnified
from unirl.conformance.doubles.trainer import Training, largest_gap
from unirl.conformance.doubles.two_ranks import Job as RankJob
from unirl.conformance.doubles.two_ranks import Result, train_here, train_on_two_ranks
from unirl.conformance.fixtures.backend import GRADIENT, BackendCase, refuses
from unirl.conformance.verdicts import NotApplicable
from unirl.core.errors import BatchError
from unirl.core.roles import Algorithm, Job
from unirl.core.specs.capability import Cap
from unirl.core.specs.config import TrainConfig
from unirl.core.types.track import Track

BOUND = 2e-5
"""Relative to the largest change of a weight: fp32 sums in another order (1e-6), seen through two steps."""

KINDS_BOUND = 1e-6
"""Relative to the largest element: fp32 rounds where the two gradients of a weight are added, by 6e-8 of the sum."""

WEIGHTS = (1.0, 1.0, 0.5, 1.0, 0.25, 1.0)


def uneven(track: Track) -> Track:
    """The track with rows that count differently, so that an average of averages is not the average."""
    return dataclasses.replace(track, sample_weights=torch.tensor(WEIGHTS, device=track.sample_weights.device))


def paired(track: Track) -> Track:
    """The track with rows that are apart as units of two."""
    return dataclasses.replace(track, group_ids=("g",) * track.num_rows, unit_ids=("a", "b", "a", "c", "b", "c"))


def updated_at_once(case: BackendCase, training: Training, *, is_uneven: bool) -> tuple[dict[str, Tensor], float]:
    """The same with two tracks of the case, each as a whole; done once for the claims that compare with it."""

    def update() -> tuple[dict[str, Tensor], float]:
        tracks = [case.track(number) for number in range(2)]
        return updated(case, training, *(map(uneven, tracks) if is_uneven else tracks))

    return case.factory.shared(f"update of {case.subject.id}, {training}, uneven: {is_uneven}", update)


def updated(
    case: BackendCase,
    training: Training,
    *tracks: Track,
    micro_batch_size: int = 0,
    algorithm: Callable[[], Algorithm] = PPO,
) -> tuple[dict[str, Tensor], float]:
    """The trained weights after an update with each track, and their largest change."""
    with case.backend(training, train=TrainConfig(micro_batch_size=micro_batch_size), **GRADIENT) as trainer:
        before = trainer.trained()
        for track in tracks:
            trainer.train(track, algorithm())
        after = trainer.trained()
    return after, largest_gap(after, before)


@claim("backend")
def test_micro_batches_never_change_the_update(case: BackendCase) -> None:
    """The micro-batch size affects only memory: one row at a time, or four and then two, give the same update as all
    six at once.

    If it fails: divide each loss term by its weight over the whole update, known before the first backward, not by the
    rows of the micro-batch nor by the number of micro-batches.
    """
    tracks = [uneven(case.track(number)) for number in range(2)]
    for training in case.trainings:
        expected, change = updated_at_once(case, training, is_uneven=True)
        for size in (1, 4):
            result, _ = updated(case, training, *tracks, micro_batch_size=size)
            case.record(f"{training}: micro-batches of {size}", largest_gap(result, expected) / change, bound=BOUND)


@claim("backend")
def test_units_stay_whole(case: BackendCase) -> None:
    """Rows of one unit (`Track.unit_ids`), such as a preference pair, are in one micro-batch and one update, and every
    split that keeps units gives the same update. A unit larger than a micro-batch is refused.

    If it fails: partition units (`Track.units`) over updates and micro-batches, and not rows.
    """
    tracks = [paired(uneven(case.track(number))) for number in range(2)]
    for training in case.trainings:
        expected, change = updated(case, training, *tracks, algorithm=DPO)
        for size in (2, 4):
            result, _ = updated(case, training, *tracks, micro_batch_size=size, algorithm=DPO)
            case.record(f"{training}: micro-batches of {size}", largest_gap(result, expected) / change, bound=BOUND)
        with case.backend(training, train=TrainConfig(micro_batch_size=2, updates_per_step=3)) as trainer:
            trainer.train(tracks[0], DPO())
        with (
            case.backend(training, train=TrainConfig(micro_batch_size=1)) as trainer,
            refuses(BatchError, "a unit of 2 rows in micro-batches of 1"),
        ):
            trainer.train(tracks[0], DPO())


@claim("backend")
def test_the_order_of_rows_never_changes_the_update(case: BackendCase) -> None:
    """Rows may come in any order, with groups split up: all fields of a sample stay together.

    If it fails: look for whatever is matched by position with something that was sorted or grouped: advantages,
    conditions, weights.
    """
    mixed = [uneven(case.track(number)).select([4, 0, 5, 2, 1, 3]) for number in range(2)]
    for training in case.trainings:
        expected, change = updated_at_once(case, training, is_uneven=True)
        result, _ = updated(case, training, *mixed)
        case.record(f"{training}: rows in another order", largest_gap(result, expected) / change, bound=BOUND)


@claim("backend")
def test_rows_of_weight_0_change_nothing(case: BackendCase) -> None:
    """Padding and filtered samples are ignored: the update is that of the other rows.

    If it fails: look for a mean over all rows where a sum over weights is meant, and for weights that are dropped on
    the way to the algorithm.
    """
    tracks = [case.track(number) for number in range(2)]
    kept = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    padded = [track.padded(9) for track in tracks]
    filtered = [dataclasses.replace(track, sample_weights=kept.to(track.sample_weights.device)) for track in tracks]
    chosen = [track.select([0, 2, 3, 5]) for track in tracks]
    for training in case.trainings:
        wholes = {
            "padded": (padded, updated_at_once(case, training, is_uneven=False)),
            "filtered": (filtered, updated(case, training, *chosen)),
        }
        for what, (some, (expected, change)) in wholes.items():
            result, _ = updated(case, training, *some, micro_batch_size=2)
            case.record(f"{training}: {what}", largest_gap(result, expected) / change, bound=BOUND)


@claim("backend")
def test_metrics_of_an_algorithm_add_up(case: BackendCase) -> None:
    """A mean that an algorithm reports is the mean over all rows, however they were batched; maxima and sums as well.

    If it fails: add up the `total` and `weight` of each `Metric` over the micro-batches and divide once at the end.
    """
    track = uneven(case.track())
    assert track.advantages is not None
    advantages = [float(value) for value in track.advantages]
    expected = {
        "advantage_mean": sum(w * a for w, a in zip(WEIGHTS, advantages, strict=True)) / sum(WEIGHTS),
        "advantage_max": max(advantages),
        "rows": 6.0,
    }
    for size in (0, 4):
        with case.backend(case.trainings[0], train=TrainConfig(micro_batch_size=size)) as trainer:
            metrics = trainer.train(track).only
        for name, value in expected.items():
            assert name in metrics, f"the algorithm's metric {name!r} is not among {sorted(metrics)}"
            # The totals of micro-batches are sums in fp32.
            assert metrics[name] == pytest.approx(value, rel=1e-6), (
                f"{name} is {metrics[name]} in micro-batches of {size or 'all'} rows; over all rows it is {value}"
            )


@claim("backend", proves=Cap.MANY_RANKS)
def test_two_ranks_update_as_one(case: BackendCase) -> None:
    """Two ranks with half of the rows each, with unequal parts, or with only padding on one of them, make the same
    update as one process with all rows, in every weight and average; with units of two rows as well.

    If it fails: see whether gradients are averaged over ranks while the loss is divided by the weights of all ranks
    (multiply by the ranks, or sum); whether the denominators are summed over ranks; whether both ranks start from the
    same adapters; and whether both run equally many forwards. A claim that runs out of time is a rank that waits.
    """
    if case.device != "cpu":
        raise NotApplicable("its ranks are processes on the CPU, and there it is tried")
    found = case.subject.found("backend")
    whole = [uneven(case.track(number)) for number in range(2)]
    padding = [track.select([0]).padded(2).select([1]) for track in whole]
    parts = {
        "halves": [(track.select([0, 1, 2]), track.select([3, 4, 5])) for track in whole],
        "unequal parts": [(track.select([0, 1, 3, 5]), track.select([2, 4])) for track in whole],
        "padding on one": list(zip(whole, padding, strict=True)),
    }
    pairs = [paired(track) for track in whole]
    units = [(track.select([0, 2, 1, 4]), track.select([3, 5])) for track in pairs]
    one: dict[str, Result] = {}
    jobs: dict[str, RankJob] = {}
    for training in case.trainings:
        config = case.config(training, *case.extras(training), **GRADIENT)
        job = RankJob(
            build=found.spec.build,
            config=config,
            training=training,
            policies=case.policies(training, config),
            train=TrainConfig(micro_batch_size=2),
            tracks=(tuple(whole),),
        )
        of_units = dataclasses.replace(job, tracks=(tuple(pairs),), algorithm=DPO)
        build = partial(case.factory.build, found)
        for what, both in parts.items():
            jobs[f"{training}, {what}"] = dataclasses.replace(job, tracks=_by_rank(both))
        jobs[f"{training}, units"] = dataclasses.replace(of_units, tracks=_by_rank(units))
        rows_alone, units_alone = train_here(job, build), train_here(of_units, build)
        one |= {what: units_alone if "units" in what else rows_alone for what in jobs if what not in one}
    for rank, results in enumerate(train_on_two_ranks(list(jobs.values()), case.folder)):
        for what, result in zip(jobs, results, strict=True):
            expected = one[what]
            gap = largest_gap(result.tensors, expected.tensors)
            case.record(f"{what}, rank {rank}", gap / expected.change, bound=BOUND)
            assert result.version == expected.version, f"{what}: {result.version} steps, not {expected.version}"
            mean, over_all = result.metrics["advantage_mean"], expected.metrics["advantage_mean"]
            assert mean == pytest.approx(over_all, rel=1e-6), f"{what}: rank {rank} reports {mean}, not {over_all}"


def _by_rank(parts: Sequence[tuple[Track, Track]]) -> tuple[tuple[Track, ...], ...]:
    """The parts of every track by rank."""
    return tuple(tuple(part[rank] for part in parts) for rank in range(2))


@claim("backend", needs={"backend": (Cap.TRAIN_FULL,)})
def test_a_step_over_several_jobs_is_one_step_of_their_summed_gradients(case: BackendCase) -> None:
    """Tracks that train the same weights are trained on in one optimizer step, whose gradient is the weighted sum of
    theirs.

    If it fails: `train` takes a step for each job, or leaves out a job or its weight;
    `unirl.numerics.train.stack.train_on` takes all of them.
    """
    jobs = [Job(name=f"job {number}", track=case.track(number), algorithm=PPO()) for number in range(2)]
    _check_sum(case, jobs, case.model, bound=BOUND)


@claim("backend", needs={"backend": (Cap.TRAIN_FULL,)}, track="any")
def test_jobs_of_two_kinds_take_one_step_of_their_summed_gradients(case: BackendCase) -> None:
    """Images and completions of one model, whose layers they share, are trained on in one optimizer step: its gradient
    is the sum of the one that each of the two jobs gives alone, times the weight of the job.

    If it fails while it holds for two tracks of images: look for jobs that are sorted or told apart by the kind of
    their tracks on the way to `unirl.numerics.train.stack.train_on`, and for losses that are divided by the number of
    rows, steps or tokens of all jobs.
    """
    tracks = {"image": case.track(of=TinyUnified), "text": case.text_track(of=TinyUnified)}
    jobs = [Job(name=name, track=track, algorithm=PPO()) for name, track in tracks.items()]
    alone = _check_sum(case, jobs, lambda: TinyUnified(device=case.device), bound=KINDS_BOUND)
    for job, gradient in zip(jobs, alone, strict=True):
        trains = any(bool(value.any()) for name, value in gradient.items() if name.startswith("blocks."))
        assert trains, f"job {job.name!r} gives the layers that both jobs train no gradient"


def _check_sum(
    case: BackendCase, jobs: Sequence[Job], model: Callable[[], TinyDenoiser | TinyDecoder], *, bound: float
) -> list[dict[str, Tensor]]:
    """Compare the gradient of two jobs with the weighted sum of those that each gives alone, which are returned."""
    # Powers of two, which round nothing.
    weights = (1.0, 4.0)

    def gradient(*jobs: Job) -> dict[str, Tensor]:
        """AdamW's first step at an eps of 1e9: a thousand times the gradient, which the weights then hardly round."""
        with case.backend("full", model=model(), lr=1e12, eps=1e9, max_grad_norm=None) as trainer:
            before, version = trainer.trained(), trainer.backend.version
            report = trainer.backend.train(jobs, progress=0.25)
            taken = trainer.backend.version - version
            assert (report.num_updates, taken) == (1, 1), (
                f"{len(jobs)} jobs took {taken} steps and report {report.num_updates}; 1 was expected"
            )
            return {name: value - before[name] for name, value in trainer.trained().items()}

    one, other = (gradient(job) for job in jobs)
    joint = gradient(*(dataclasses.replace(job, weight=weight) for job, weight in zip(jobs, weights, strict=True)))
    largest = max(float(value.abs().max()) for value in joint.values())
    expected = {name: weights[0] * one[name] + weights[1] * other[name] for name in joint}
    case.record("relative gap to the sum", largest_gap(joint, expected) / largest, bound=bound)
    return [one, other]
