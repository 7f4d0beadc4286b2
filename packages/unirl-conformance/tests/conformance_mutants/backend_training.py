"""Backends whose updates are not the right ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from unirl.core.roles import Job, Losses, LossTerm, Metric, TrainReport, WeightUpdate
from unirl.core.specs.capability import Cap
from unirl.core.types.track import TextSegment

from conformance_mutants.backend_wrapped import (
    CutsInputs,
    LiveAlone,
    ShiftsSigmas,
    Wrapped,
    WrappedAlgorithm,
    change_gradients,
    put,
    scaled,
)
from conformance_mutants.mutant import mutant, mutants_in

FULL = (Cap.TRAIN_FULL,)
LORA = (Cap.TRAIN_LORA, Cap.REFERENCE_ADAPTER_OFF)
TEXT = "training-on-text-is-torchs-adamw"
"""What is wrong with every update is wrong with those on text."""


@mutant(claim="full-training-is-torchs-adamw", breaks="takes beta2 for beta1", also=(TEXT,), promises=FULL)
class SwapsBetas(Wrapped):
    def __init__(self, config: Any, **context: Any) -> None:
        super().__init__(dataclasses.replace(config, betas=config.betas[::-1]), **context)


@mutant(
    claim="lora-training-is-torchs-adamw-on-the-adapters", breaks="takes beta2 for beta1", also=(TEXT,), promises=LORA
)
class SwapsBetasOfAdapters(SwapsBetas):
    pass


@mutant(
    claim="full-training-is-torchs-adamw",
    breaks="trains no bias",
    also=(
        "another-model-may-be-the-reference-of-a-job",
        "weight-decay-is-decoupled",
        "gradients-are-clipped-by-their-global-norm",
        TEXT,
    ),
    promises=FULL,
)
class FreezesBiases(Wrapped):
    def train(self, jobs: Sequence[Job], *, progress: float) -> TrainReport:
        params = self.trained()
        biases = {name: param.detach().clone() for name, param in params.items() if name.endswith("bias")}
        report = super().train(jobs, progress=progress)
        put(params, biases)
        return report


@mutant(claim=TEXT, breaks="replays texts at temperature 1 whatever they were sampled at", promises=FULL)
class TrainsAtTemperature1(Wrapped):
    """Replays texts as if they had been sampled at temperature 1."""

    def train(self, jobs: Sequence[Job], *, progress: float) -> TrainReport:
        def changed(job: Job) -> Job:
            track, algorithm = job.track, job.algorithm
            if isinstance(track.segment, TextSegment):
                track = dataclasses.replace(track, segment=dataclasses.replace(track.segment, temperature=1.0))
            return dataclasses.replace(job, track=track, algorithm=algorithm)

        return super().train([changed(job) for job in jobs], progress=progress)


@mutant(claim="weight-decay-is-decoupled", breaks="adds the decay to the gradient", promises=FULL)
class CouplesDecay(Wrapped):
    def __init__(self, config: Any, **context: Any) -> None:
        super().__init__(dataclasses.replace(config, weight_decay=0.0), **context)
        self.decay = config.weight_decay

    def train(self, jobs: Sequence[Job], *, progress: float) -> TrainReport:
        def changed(job: Job) -> Job:
            track, algorithm = job.track, job.algorithm
            params, decay = self.trained(), self.decay

            class Decayed(WrappedAlgorithm):
                def loss_weights(self, track: Any) -> Any:
                    return {**super().loss_weights(track), "decay": torch.ones_like(track.sample_weights)}

                def loss(self, track: Any, replay: Any, *, progress: float) -> Losses:
                    losses = super().loss(track, replay, progress=progress)
                    # Its gradient is the decay of a weight times the weight.
                    size = decay / 2 * sum(param.square().sum() for param in params.values())
                    ones = torch.ones_like(track.sample_weights)
                    return dataclasses.replace(
                        losses, terms=[*losses.terms, LossTerm(name="decay", values=size * ones, weights=ones)]
                    )

            return dataclasses.replace(job, track=track, algorithm=Decayed(algorithm) if decay else algorithm)

        return super().train([changed(job) for job in jobs], progress=progress)


@mutant(claim="gradients-are-clipped-by-their-global-norm", breaks="clips tensors one by one", promises=FULL)
class ClipsEachTensor(Wrapped):
    def __init__(self, config: Any, **context: Any) -> None:
        super().__init__(dataclasses.replace(config, max_grad_norm=None), **context)
        if config.max_grad_norm is not None:
            clip = torch.nn.utils.clip_grad_norm_
            change_gradients(self.trained(), lambda param: clip([param], config.max_grad_norm))


@mutant(
    claim="a-loss-may-compare-with-another-policy",
    name="replays-live-alone",
    breaks="replays with the live weights whatever is asked",
    also=("the-velocity-at-a-stored-point-is-that-of-the-replay",),
    promises=LORA,
)
class ReplaysTheLivePolicyAlone(Wrapped):
    def train(self, jobs: Sequence[Job], *, progress: float) -> TrainReport:
        def changed(job: Job) -> Job:
            track, algorithm = job.track, job.algorithm
            return dataclasses.replace(job, track=track, algorithm=LiveAlone(algorithm))

        return super().train([changed(job) for job in jobs], progress=progress)


@mutant(
    claim="the-gradient-goes-through-the-sampler",
    breaks="cuts the gradient between the steps of the sampler",
    promises=(*FULL, Cap.THROUGH_SAMPLER),
)
class CutsTheSampler(Wrapped):
    def train(self, jobs: Sequence[Job], *, progress: float) -> TrainReport:
        cut = [dataclasses.replace(job, algorithm=CutsInputs(job.algorithm)) for job in jobs]
        return super().train(cut, progress=progress)


@mutant(
    claim="the-velocity-at-a-stored-point-is-that-of-the-replay",
    breaks="evaluates the velocity at another sigma than the one it is given",
    promises=FULL,
)
class ShiftsTheSigmas(Wrapped):
    def train(self, jobs: Sequence[Job], *, progress: float) -> TrainReport:
        def changed(job: Job) -> Job:
            track, algorithm = job.track, job.algorithm
            return dataclasses.replace(job, track=track, algorithm=ShiftsSigmas(algorithm))

        return super().train([changed(job) for job in jobs], progress=progress)


@mutant(
    claim="the-first-update-has-ratio-one",
    breaks="keeps the training mode of the model that it was given",
    promises=FULL,
)
class LeavesDropoutOn(Wrapped):
    def __init__(self, config: Any, *, model: Any, **context: Any) -> None:
        training = model.trainable.training
        super().__init__(config, model=model, **context)
        model.trainable.train(training)


@mutant(
    claim="a-gradient-that-is-not-finite-is-skipped-and-counted",
    name="not-finite-is-zero",
    breaks="steps with zeros where gradients are not finite",
    promises=FULL,
)
class TakesNotFiniteForZero(Wrapped):
    def __init__(self, config: Any, **context: Any) -> None:
        super().__init__(config, **context)
        change_gradients(self.trained(), lambda param: param.grad.nan_to_num_(0.0, 0.0, 0.0))


@mutant(claim="the-version-counts-optimizer-steps", breaks="counts calls, not updates", promises=FULL)
class CountsRollouts(Wrapped):
    @property
    def version(self) -> int:
        return -(-super().version // self.train_config.updates_per_step)

    def export_weights(self, **asked: Any) -> WeightUpdate:
        return dataclasses.replace(super().export_weights(**asked), version=self.version)


@mutant(
    claim="the-anchor-comes-before-the-first-update",
    breaks="anchors every micro-batch just before its loss",
    promises=FULL,
)
class AnchorsLate(Wrapped):
    def train(self, jobs: Sequence[Job], *, progress: float) -> TrainReport:
        def changed(job: Job) -> Job:
            track, algorithm = job.track, job.algorithm

            class Late(WrappedAlgorithm):
                def with_old_log_probs(self, track: Any, replay: Any) -> Any:
                    return track

                def loss(self, track: Any, replay: Any, *, progress: float) -> Losses:
                    with torch.no_grad():
                        track = self.inner.with_old_log_probs(track, replay)
                    return super().loss(track, replay, progress=progress)

            return dataclasses.replace(job, track=track, algorithm=Late(algorithm))

        return super().train([changed(job) for job in jobs], progress=progress)


# Those of texts hold other numbers of tokens.
@mutant(
    claim="micro-batches-never-change-the-update",
    breaks="averages the averages of micro-batches",
    also=(TEXT, "units-stay-whole"),
    promises=FULL,
)
class AveragesAverages(Wrapped):
    def train(self, jobs: Sequence[Job], *, progress: float) -> TrainReport:
        def changed(job: Job) -> Job:
            track, algorithm = job.track, job.algorithm

            class Averaged(WrappedAlgorithm):
                def loss(self, track: Any, replay: Any, *, progress: float) -> Losses:
                    losses = super().loss(track, replay, progress=progress)
                    return scaled(losses, sum(self.sums) / len(self.sums) / float(track.sample_weights.sum()))

            return dataclasses.replace(job, track=track, algorithm=Averaged(algorithm))

        return super().train([changed(job) for job in jobs], progress=progress)


@mutant(claim="units-stay-whole", breaks="cuts units into rows", promises=FULL)
class CutsUnits(Wrapped):
    def train(self, jobs: Sequence[Job], *, progress: float) -> TrainReport:
        def changed(job: Job) -> Job:
            track, algorithm = job.track, job.algorithm
            return dataclasses.replace(job, track=dataclasses.replace(track, unit_ids=None), algorithm=algorithm)

        return super().train([changed(job) for job in jobs], progress=progress)


@mutant(claim="units-stay-whole", breaks="cuts units that are larger than a micro-batch", promises=FULL)
class CutsLargeUnits(Wrapped):
    def train(self, jobs: Sequence[Job], *, progress: float) -> TrainReport:
        def changed(job: Job) -> Job:
            track, algorithm = job.track, job.algorithm
            size = self.train_config.micro_batch_size
            if size and max(map(len, track.units())) > size:
                track = dataclasses.replace(track, unit_ids=None)
            return dataclasses.replace(job, track=track, algorithm=algorithm)

        return super().train([changed(job) for job in jobs], progress=progress)


@mutant(
    claim="the-order-of-rows-never-changes-the-update",
    name="sorts-advantages",
    breaks="matches advantages with rows in the order of their ids",
    promises=FULL,
)
class MatchesAdvantagesWithSortedIds(Wrapped):
    def train(self, jobs: Sequence[Job], *, progress: float) -> TrainReport:
        def changed(job: Job) -> Job:
            track, algorithm = job.track, job.algorithm
            order = sorted(range(track.num_rows), key=lambda row: track.sample_ids[row])
            return dataclasses.replace(
                job, track=dataclasses.replace(track, advantages=track.advantages[order]), algorithm=algorithm
            )

        return super().train([changed(job) for job in jobs], progress=progress)


@mutant(claim="rows-of-weight-0-change-nothing", breaks="trains on rows of weight 0", promises=FULL)
class CountsPadding(Wrapped):
    def train(self, jobs: Sequence[Job], *, progress: float) -> TrainReport:
        def changed(job: Job) -> Job:
            track, algorithm = job.track, job.algorithm
            weights = torch.where(track.sample_weights == 0, 1.0, track.sample_weights)
            return dataclasses.replace(
                job, track=dataclasses.replace(track, sample_weights=weights), algorithm=algorithm
            )

        return super().train([changed(job) for job in jobs], progress=progress)


@mutant(
    claim="metrics-of-an-algorithm-add-up", breaks="averages the averages of micro-batches in metrics", promises=FULL
)
class AveragesMetrics(Wrapped):
    def train(self, jobs: Sequence[Job], *, progress: float) -> TrainReport:
        def changed(job: Job) -> Job:
            track, algorithm = job.track, job.algorithm

            class Averaged(WrappedAlgorithm):
                def loss(self, track: Any, replay: Any, *, progress: float) -> Losses:
                    losses = super().loss(track, replay, progress=progress)
                    metrics = {
                        name: Metric(total=metric.total / metric.weight, reduce=metric.reduce)
                        for name, metric in losses.metrics.items()
                    }
                    return dataclasses.replace(losses, metrics=metrics)

            return dataclasses.replace(job, track=track, algorithm=Averaged(algorithm))

        return super().train([changed(job) for job in jobs], progress=progress)


@mutant(
    claim="two-ranks-update-as-one",
    name="mean-for-sum",
    breaks="leaves out that gradients are averaged over ranks",
    promises=(*FULL, Cap.MANY_RANKS),
)
class TakesTheMeanOfRanksForTheSum(Wrapped):
    def train(self, jobs: Sequence[Job], *, progress: float) -> TrainReport:
        def changed(job: Job) -> Job:
            track, algorithm = job.track, job.algorithm
            num_ranks = dist.get_world_size() if dist.is_initialized() else 1

            class Averaged(WrappedAlgorithm):
                def loss(self, track: Any, replay: Any, *, progress: float) -> Losses:
                    return scaled(super().loss(track, replay, progress=progress), 1 / num_ranks)

            return dataclasses.replace(job, track=track, algorithm=Averaged(algorithm))

        return super().train([changed(job) for job in jobs], progress=progress)


@mutant(
    claim="a-step-over-several-jobs-is-one-step-of-their-summed-gradients",
    breaks="takes a step for each job",
    promises=FULL,
)
class StepsForEachJob(Wrapped):
    def train(self, jobs: Sequence[Job], *, progress: float) -> TrainReport:
        return [super(StepsForEachJob, self).train([job], progress=progress) for job in jobs][-1]


@mutant(
    claim="a-step-over-several-jobs-is-one-step-of-their-summed-gradients",
    name="jobs-weigh-alike",
    breaks="leaves out the weights of jobs",
    promises=FULL,
)
class WeighsJobsAlike(Wrapped):
    def train(self, jobs: Sequence[Job], *, progress: float) -> TrainReport:
        return super().train([dataclasses.replace(job, weight=1.0) for job in jobs], progress=progress)


@mutant(
    claim="another-model-may-be-the-reference-of-a-job",
    breaks="leaves out the reference model of a job",
    promises=FULL,
)
class KnowsNoTeacher(Wrapped):
    def train(self, jobs: Sequence[Job], *, progress: float) -> TrainReport:
        return super().train([dataclasses.replace(job, reference=None) for job in jobs], progress=progress)


BROKEN = mutants_in(__name__)
