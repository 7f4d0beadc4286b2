"""Backends whose updates are not the right ones."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from unirl.backends.fsdp2.backend import Fsdp2Backend, _Updater
from unirl.core.capability import Cap
from unirl.core.roles import Algorithm, Losses, Metric, TrainReport
from unirl.core.track import TextSegment, Track

from conformance_mutants.mutant import Mutant

FULL = (Cap.TRAIN_FULL,)
LORA = (Cap.TRAIN_LORA, Cap.REFERENCE_ADAPTER_OFF)
TEXT = "training-on-text-is-torchs-adamw"
"""What is wrong with every update is wrong with those on text."""


class SwapsBetas(Fsdp2Backend):
    def __init__(self, config: Any, **context: Any) -> None:
        super().__init__(dataclasses.replace(config, betas=config.betas[::-1]), **context)


class SwapsBetasOfAdapters(SwapsBetas):
    pass


class FreezesBiases(Fsdp2Backend):
    def _prepare(self, model: Any, seed: int) -> int:
        layers = super()._prepare(model, seed)
        for name, param in self._module.named_parameters():
            param.requires_grad_(not name.endswith("bias"))
        return layers


class TrainsAtTemperature1(Fsdp2Backend):
    """Replays texts as if they had been sampled at temperature 1."""

    def train(self, track: Track, algorithm: Algorithm, *, progress: float) -> TrainReport:
        if isinstance(track.segment, TextSegment):
            track = dataclasses.replace(track, segment=dataclasses.replace(track.segment, temperature=1.0))
        return super().train(track, algorithm, progress=progress)


class CouplesDecay(Fsdp2Backend):
    def __init__(self, config: Any, **context: Any) -> None:
        super().__init__(config, **context)
        adam = self._optimizer.adam
        settings = {name: adam.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}
        self._optimizer.adam = torch.optim.Adam(list(self._params.values()), **settings)


class ClipsEachTensor(Fsdp2Backend):
    def __init__(self, config: Any, **context: Any) -> None:
        super().__init__(config, **context)
        optimizer, step = self._optimizer, self._optimizer.step
        optimizer._config = dataclasses.replace(config, max_grad_norm=None)

        def clipped() -> Any:
            for param in self._params.values():
                if config.max_grad_norm is not None:
                    torch.nn.utils.clip_grad_norm_([param], config.max_grad_norm)
            return step()

        optimizer.step = clipped


class ReplaysTheLivePolicyAlone(Fsdp2Backend):
    def __init__(self, config: Any, **context: Any) -> None:
        super().__init__(config, **context)
        inner: Any = self._replay
        self._replay: Any = lambda track, policy="live": inner(track)


class LeavesDropoutOn(Fsdp2Backend):
    def __init__(self, config: Any, *, model: Any, **context: Any) -> None:
        training = model.trainable.training
        super().__init__(config, model=model, **context)
        model.trainable.train(training)


class TakesNotFiniteForZero(Fsdp2Backend):
    def __init__(self, config: Any, **context: Any) -> None:
        super().__init__(config, **context)
        step = self._optimizer.step

        def cleaned() -> Any:
            for param in self._params.values():
                if param.grad is not None:
                    param.grad.nan_to_num_(0.0, 0.0, 0.0)
            return step()

        self._optimizer.step = cleaned


class CountsRollouts(Fsdp2Backend):
    @property
    def version(self) -> int:
        return -(-super().version // self._train.updates_per_step)


class Wrapped:
    """The algorithm, for backends that call it in a way of their own."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.sums: list[float] = []

    def anchor(self, track: Any, replay: Any) -> Any:
        self.sums.append(float(track.weights.sum()))
        return self.inner.anchor(track, replay)

    def weights(self, track: Any) -> Any:
        return self.inner.weights(track)

    def loss(self, track: Any, replay: Any, *, progress: float) -> Losses:
        return self.inner.loss(track, replay, progress=progress)


class AnchorsLate(Fsdp2Backend):
    def train(self, track: Any, algorithm: Any, *, progress: float) -> TrainReport:
        class Late(Wrapped):
            def anchor(self, track: Any, replay: Any) -> Any:
                return track

            def loss(self, track: Any, replay: Any, *, progress: float) -> Losses:
                with torch.no_grad():
                    track = self.inner.anchor(track, replay)
                return super().loss(track, replay, progress=progress)

        return super().train(track, Late(algorithm), progress=progress)


class AveragesAverages(Fsdp2Backend):
    def train(self, track: Any, algorithm: Any, *, progress: float) -> TrainReport:
        class Averaged(Wrapped):
            def loss(self, track: Any, replay: Any, *, progress: float) -> Losses:
                losses = super().loss(track, replay, progress=progress)
                factor = sum(self.sums) / len(self.sums) / float(track.weights.sum())
                terms: Any = losses.terms
                return dataclasses.replace(
                    losses, terms=[dataclasses.replace(term, scale=term.scale * factor) for term in terms]
                )

        return super().train(track, Averaged(algorithm), progress=progress)


class MatchesAdvantagesWithSortedIds(Fsdp2Backend):
    def train(self, track: Any, algorithm: Any, *, progress: float) -> TrainReport:
        order = sorted(range(track.num_rows), key=lambda row: track.sample_ids[row])
        return super().train(
            dataclasses.replace(track, advantages=track.advantages[order]), algorithm, progress=progress
        )


class CountsPadding(Fsdp2Backend):
    def train(self, track: Any, algorithm: Any, *, progress: float) -> TrainReport:
        weights = torch.where(track.weights == 0, 1.0, track.weights)
        return super().train(dataclasses.replace(track, weights=weights), algorithm, progress=progress)


class AveragesMetrics(Fsdp2Backend):
    def train(self, track: Any, algorithm: Any, *, progress: float) -> TrainReport:
        class Averaged(Wrapped):
            def loss(self, track: Any, replay: Any, *, progress: float) -> Losses:
                losses = super().loss(track, replay, progress=progress)
                metrics = {
                    name: Metric(total=metric.total / metric.weight, reduce=metric.reduce)
                    for name, metric in losses.metrics.items()
                }
                return dataclasses.replace(losses, metrics=metrics)

        return super().train(track, Averaged(algorithm), progress=progress)


class TakesTheMeanOfRanksForTheSum(Fsdp2Backend):
    def __init__(self, config: Any, **context: Any) -> None:
        super().__init__(config, **context)

        class Summing(_Updater):
            gradient_reduction: Literal["mean", "sum"] = "sum"

        self._updater = Summing(self)


BROKEN: dict[type[Fsdp2Backend], tuple[Mutant, tuple[Cap, ...]]] = {
    SwapsBetas: (
        Mutant(claim="full-training-is-torchs-adamw", name="swaps-betas", broken="takes beta2 for beta1", also=(TEXT,)),
        FULL,
    ),
    FreezesBiases: (
        Mutant(
            claim="full-training-is-torchs-adamw",
            name="freezes-biases",
            broken="trains no bias",
            also=("weight-decay-is-decoupled", "gradients-are-clipped-by-their-global-norm", TEXT),
        ),
        FULL,
    ),
    SwapsBetasOfAdapters: (
        Mutant(
            claim="lora-training-is-torchs-adamw-on-the-adapters",
            name="swaps-betas-of-adapters",
            broken="takes beta2 for beta1",
            also=(TEXT,),
        ),
        LORA,
    ),
    TrainsAtTemperature1: (
        Mutant(
            claim=TEXT,
            name="trains-at-temperature-1",
            broken="replays texts at temperature 1 whatever they were sampled at",
        ),
        FULL,
    ),
    CouplesDecay: (
        Mutant(claim="weight-decay-is-decoupled", name="couples-decay", broken="adds the decay to the gradient"),
        FULL,
    ),
    ClipsEachTensor: (
        Mutant(
            claim="gradients-are-clipped-by-their-global-norm",
            name="clips-each-tensor",
            broken="clips tensors one by one",
        ),
        FULL,
    ),
    ReplaysTheLivePolicyAlone: (
        Mutant(
            claim="a-loss-may-compare-with-another-policy",
            name="replays-live-alone",
            broken="replays with the live weights whatever is asked",
        ),
        LORA,
    ),
    LeavesDropoutOn: (
        Mutant(
            claim="the-first-update-has-ratio-one",
            name="leaves-dropout-on",
            broken="keeps the training mode of the model that it was given",
        ),
        FULL,
    ),
    TakesNotFiniteForZero: (
        Mutant(
            claim="a-gradient-that-is-not-finite-is-skipped-and-counted",
            name="not-finite-is-zero",
            broken="steps with zeros where gradients are not finite",
        ),
        FULL,
    ),
    CountsRollouts: (
        Mutant(claim="the-version-counts-optimizer-steps", name="counts-rollouts", broken="counts calls, not updates"),
        FULL,
    ),
    AnchorsLate: (
        Mutant(
            claim="the-anchor-comes-before-the-first-update",
            name="anchors-late",
            broken="anchors every micro-batch just before its loss",
        ),
        FULL,
    ),
    AveragesAverages: (
        Mutant(
            claim="micro-batches-never-change-the-update",
            name="averages-averages",
            broken="averages the averages of micro-batches",
            # Those of texts hold other numbers of tokens.
            also=(TEXT,),
        ),
        FULL,
    ),
    MatchesAdvantagesWithSortedIds: (
        Mutant(
            claim="the-order-of-rows-never-changes-the-update",
            name="sorts-advantages",
            broken="matches advantages with rows in the order of their ids",
        ),
        FULL,
    ),
    CountsPadding: (
        Mutant(claim="rows-of-weight-0-change-nothing", name="counts-padding", broken="trains on rows of weight 0"),
        FULL,
    ),
    AveragesMetrics: (
        Mutant(
            claim="metrics-of-an-algorithm-add-up",
            name="averages-metrics",
            broken="averages the averages of micro-batches in metrics",
        ),
        FULL,
    ),
    TakesTheMeanOfRanksForTheSum: (
        Mutant(
            claim="two-ranks-update-as-one",
            name="mean-for-sum",
            broken="leaves out that gradients are averaged over ranks",
        ),
        (*FULL, Cap.MANY_RANKS),
    ),
}
