"""Backends whose updates are wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from unirl.core.roles import Job, Losses, LossTerm, Metric, TrainReport, WeightUpdate
from unirl.core.specs.capability import Cap
from unirl.core.types.track import TextSegment, Track

from conformance_mutants.backend_wrapped import (
    FULL,
    LIVE_ALONE,
    LORA,
    Wrapped,
    backend,
    change_gradients,
    copies,
    each_algorithm,
    each_job,
    each_track,
    put,
    scaled,
)
from conformance_mutants.changes import Proxy, changed, loss_with, returns

TEXT, TEACHER = "training-on-text-is-torchs-adamw", "another-model-may-be-the-reference-of-a-job"
"""TEXT also fails for mutants that break every update."""
DECAY, CLIP = "weight-decay-is-decoupled", "gradients-are-clipped-by-their-global-norm"
ADAMW, VELOCITY = "full-training-is-torchs-adamw", "the-velocity-at-a-stored-point-is-that-of-the-replay"
SUMMED = "a-step-over-several-jobs-is-one-step-of-their-summed-gradients"
TWO_KINDS = "jobs-of-two-kinds-take-one-step-of-their-summed-gradients"
SWAPPED = {"config": lambda config: replace(config, betas=config.betas[::-1])}


class CountsRollouts(Wrapped):
    @property
    def version(self) -> int:
        return -(-self.inner.version // self.train_config.updates_per_step)

    def export_weights(self, **asked: Any) -> WeightUpdate:
        return replace(super().export_weights(**asked), version=self.version)


class CouplesDecay(Wrapped):
    def __init__(self, config: Any, **context: Any) -> None:
        super().__init__(replace(config, weight_decay=0.0), **context)
        self.decay = config.weight_decay


class ClipsEachTensor(Wrapped):
    def __init__(self, config: Any, **context: Any) -> None:
        super().__init__(replace(config, max_grad_norm=None), **context)
        limit = config.max_grad_norm
        if limit is not None:
            change_gradients(self, lambda param: torch.nn.utils.clip_grad_norm_([param], limit))


class ScalesCheckpoints(Wrapped):
    def __init__(self, config: Any, **context: Any) -> None:
        super().__init__(config, **context)
        if config.activation_checkpointing:
            change_gradients(self, lambda param: param.grad.mul_(1 + 2**-20))


def freezes_biases(part: Wrapped, train: Any, jobs: Sequence[Job], *, progress: float) -> TrainReport:
    params = part.trained()
    biases = copies({name: param for name, param in params.items() if name.endswith("bias")})
    report = train(jobs, progress=progress)
    put(params, biases)
    return report


def with_decay_in_loss(part: CouplesDecay, job: Job) -> dict[str, Any]:
    params, decay = part.trained().values(), part.decay
    if not decay:
        return {}

    def loss(_: Any, loss: Any, track: Track, forward: Any, *, progress: float) -> Losses:
        losses = loss(track, forward, progress=progress)
        # Its gradient is the decay of a weight times the weight.
        size = decay / 2 * sum(param.square().sum() for param in params)
        ones = torch.ones_like(track.sample_weights)
        return replace(losses, terms=[*losses.terms, LossTerm(name="decay", values=size * ones, weights=ones)])

    def loss_weights(_: Any, loss_weights: Any, track: Track) -> Any:
        return {**loss_weights(track), "decay": torch.ones_like(track.sample_weights)}

    return {"algorithm": changed(Proxy(job.algorithm), {"loss": loss, "loss_weights": loss_weights})}


def anchors_late(algorithm: Proxy, loss: Any, track: Track, forward: Any, *, progress: float) -> Losses:
    with torch.no_grad():
        track = algorithm.inner.with_old_log_probs(track, forward)
    return loss(track, forward, progress=progress)


def averaging_averages(_: Wrapped, job: Job) -> dict[str, Any]:
    sums: list[float] = []
    """Weights of the rows of every micro-batch."""

    def with_old_log_probs(_: Any, anchor: Any, track: Track, forward: Any) -> Track:
        sums.append(float(track.sample_weights.sum()))
        return anchor(track, forward)

    def loss(_: Any, loss: Any, track: Track, forward: Any, *, progress: float) -> Losses:
        share = sum(sums) / len(sums) / float(track.sample_weights.sum())
        return scaled(loss(track, forward, progress=progress), share)

    return {"algorithm": changed(Proxy(job.algorithm), {"with_old_log_probs": with_old_log_probs, "loss": loss})}


def divided_by_ranks(losses: Losses) -> Losses:
    return scaled(losses, 1 / (dist.get_world_size() if dist.is_initialized() else 1))


def with_mean_metrics(losses: Losses) -> Losses:
    means = {name: Metric(total=one.total / one.weight, reduce=one.reduce) for name, one in losses.metrics.items()}
    return replace(losses, metrics=means)


def is_text(track: Track) -> bool:
    return isinstance(track.segment, TextSegment)


def steps_for_each_kind(_: Wrapped, train: Any, jobs: Sequence[Job], **how: Any) -> TrainReport:
    texts = [job for job in jobs if is_text(job.track)]
    images = [job for job in jobs if not is_text(job.track)]
    return [train(kind, **how) for kind in (images, texts) if kind][-1]


def cuts_large_units(part: Wrapped, track: Track) -> dict[str, Any]:
    size = part.train_config.micro_batch_size
    return {"unit_ids": None} if size and max(map(len, track.units())) > size else {}


# fmt: off
MUTANTS = [
    backend("swaps-betas", ADAMW, "takes beta2 for beta1", also=(TEXT,), arguments=SWAPPED),
    backend("swaps-betas-of-adapters", "lora-training-is-torchs-adamw-on-the-adapters", "takes beta2 for beta1", LORA,
            also=(TEXT,), arguments=SWAPPED),
    backend("freezes-biases", ADAMW, "trains no bias", also=(TEACHER, DECAY, CLIP, TEXT),
            changes={"train": freezes_biases}),
    backend("trains-at-temperature-1", TEXT, "replays texts at temperature 1 whatever they were sampled at",
            changes=each_track(
                lambda _, track: {"segment": replace(track.segment, temperature=1.0)} if is_text(track) else {})),
    backend("scales-checkpoints", "settings-that-round-an-update-keep-their-bound",
            "scales gradients by a millionth where activations are recomputed", build=f"{__name__}:ScalesCheckpoints"),
    backend("couples-decay", DECAY, "adds the decay to the gradient", build=f"{__name__}:CouplesDecay",
            changes=each_job(with_decay_in_loss)),
    backend("clips-each-tensor", CLIP, "clips tensors one by one", build=f"{__name__}:ClipsEachTensor"),
    backend("replays-live-alone", "a-loss-may-compare-with-another-policy",
            "replays with the live weights whatever is asked", LORA, also=(VELOCITY,),
            changes=each_algorithm(LIVE_ALONE)),
    backend("cuts-the-sampler", "the-gradient-goes-through-the-sampler",
            "cuts the gradient between the steps of the sampler", (*FULL, Cap.THROUGH_SAMPLER),
            changes=each_algorithm(loss_with({
                "velocity": lambda _, velocity, track, x, sigma, **how: velocity(track, x.detach(), sigma, **how)}))),
    backend("shifts-the-sigmas", VELOCITY, "evaluates the velocity at another sigma than the one it is given",
            changes=each_algorithm(loss_with({
                "velocity": lambda _, velocity, track, x, sigma, **how: velocity(track, x, 0.999 * sigma, **how)}))),
    backend("leaves-dropout-on", "the-first-update-has-ratio-one",
            "keeps the training mode of the model that it was given",
            after_build=lambda part: part.model.trainable.train(part.was_training)),
    backend("not-finite-is-zero", "a-gradient-that-is-not-finite-is-skipped-and-counted",
            "steps with zeros where gradients are not finite",
            after_build=lambda part: change_gradients(part, lambda param: param.grad.nan_to_num_(0.0, 0.0, 0.0))),
    backend("counts-rollouts", "the-version-counts-optimizer-steps", "counts calls, not updates",
            build=f"{__name__}:CountsRollouts"),
    backend("anchors-late", "the-anchor-comes-before-the-first-update",
            "anchors every micro-batch just before its loss",
            changes=each_algorithm({"with_old_log_probs": lambda _, anchor, track, forward: track,
                                    "loss": anchors_late})),
    # Those of texts hold other numbers of tokens.
    backend("averages-averages", "micro-batches-never-change-the-update", "averages the averages of micro-batches",
            also=(TEXT, "units-stay-whole"), changes=each_job(averaging_averages)),
    backend("cuts-units", "units-stay-whole", "cuts units into rows",
            changes=each_track(lambda _, track: {"unit_ids": None})),
    backend("cuts-large-units", "units-stay-whole", "cuts units that are larger than a micro-batch",
            changes=each_track(cuts_large_units)),
    backend("sorts-advantages", "the-order-of-rows-never-changes-the-update",
            "matches advantages with rows in the order of their ids",
            changes=each_track(lambda _, track: {"advantages": track.advantages[
                sorted(range(track.num_rows), key=lambda row: track.sample_ids[row])]})),
    backend("counts-padding", "rows-of-weight-0-change-nothing", "trains on rows of weight 0",
            changes=each_track(lambda _, track: {
                "sample_weights": torch.where(track.sample_weights == 0, 1.0, track.sample_weights)})),
    backend("averages-metrics", "metrics-of-an-algorithm-add-up",
            "averages the averages of micro-batches in metrics",
            changes=each_algorithm({"loss": returns(with_mean_metrics)})),
    backend("mean-for-sum", "two-ranks-update-as-one", "leaves out that gradients are averaged over ranks",
            (*FULL, Cap.MANY_RANKS), changes=each_algorithm({"loss": returns(divided_by_ranks)})),
    backend("steps-for-each-job", SUMMED, "takes a step for each job", also=(TWO_KINDS,),
            changes={"train": lambda _, train, jobs, **how: [train([job], **how) for job in jobs][-1]}),
    backend("jobs-weigh-alike", SUMMED, "leaves out the weights of jobs", also=(TWO_KINDS,),
            changes=each_job(lambda _, job: {"weight": 1.0})),
    backend("steps-for-each-kind", TWO_KINDS, "takes a step for images and one for completions",
            changes={"train": steps_for_each_kind}),
    backend("texts-weigh-1", TWO_KINDS, "leaves out the weights of jobs on completions",
            changes=each_job(lambda _, job: {"weight": 1.0} if is_text(job.track) else {})),
    backend("knows-no-teacher", TEACHER, "leaves out the reference model of a job",
            changes=each_job(lambda _, job: {"references": {}})),
]
# fmt: on
