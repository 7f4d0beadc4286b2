"""Cells of which one part is broken in one way each, next to the one that is well.

The broken part is always the backend: it sees everything that passes, and parts that are broken in two places would
meet in cells of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from torch import Tensor
from unirl.algorithms.flow_grpo.plugin import FLOW_GRPO
from unirl.conformance.doubles import model as latent_model
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.hookspec import hookimpl
from unirl.core.roles import Forward, Job, Losses, Policy, TrainReport, WeightUpdate
from unirl.core.types.track import Track
from unirl.engines.trainside import plugin as trainside

from conformance_mutants.backend_wrapped import SPEC, LiveAlone, Wrapped, WrappedAlgorithm, put, scaled, with_tensors
from conformance_mutants.mutant import mutant, mutants_in


class CannotCount(Wrapped):
    """Reports a number that is none, under one way of training."""

    training: str

    def train(self, jobs: Sequence[Job], *, progress: float) -> TrainReport:
        track, algorithm = jobs[0].track, jobs[0].algorithm
        report = super().train([Job(track=track, algorithm=algorithm)], progress=progress)
        norm = math.nan if self.config.trains == self.training else report.only["grad_norm"]
        return dataclasses.replace(report, metrics={**report.only, "grad_norm": norm})


@mutant(claim="a-round-trains-adapters", name="counts-no-adapters", breaks="reports NaN where it trains adapters")
class CannotCountAdapters(CannotCount):
    training = "lora"


@mutant(claim="a-round-trains-all-weights", name="counts-no-weights", breaks="reports NaN where it trains all weights")
class CannotCountAllWeights(CannotCount):
    training = "full"


# What never moves stays where the reference policy is.
@mutant(
    claim="second-rollout-is-made-with-the-new-weights",
    breaks="trains a copy of what is sampled from",
    also=("options-on-other-policies-change-the-loss",),
)
class TrainsACopy(Wrapped):
    """Hands out trained weights, and leaves those of the module, from which is sampled, as they were."""

    _now: Mapping[str, Tensor] | None = None

    def train(self, jobs: Sequence[Job], *, progress: float) -> TrainReport:
        track, algorithm = jobs[0].track, jobs[0].algorithm
        before = copies(self.trained())
        report = super().train([Job(track=track, algorithm=algorithm)], progress=progress)
        self._now = copies(self.trained())
        put(self.trained(), before)
        return report

    def export_weights(self, *, policy: Policy = "live", kind: Literal["full", "lora", "merged"]) -> WeightUpdate:
        if self._now is None:
            return super().export_weights(policy=policy, kind=kind)
        untrained = copies(self.trained())
        put(self.trained(), self._now)
        try:
            update = super().export_weights(policy=policy, kind=kind)
            return dataclasses.replace(update, tensors=dict(update.tensors))
        finally:
            put(self.trained(), untrained)


def copies(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in params.items()}


@mutant(
    claim="micro-batches-of-a-round-give-the-same-update",
    name="counts-twice",
    breaks="counts all but the last micro-batch twice",
)
class CountsMicroBatchesTwice(Wrapped):
    """All but the last micro-batch of an update weigh double."""

    def train(self, jobs: Sequence[Job], *, progress: float) -> TrainReport:
        track, algorithm = jobs[0].track, jobs[0].algorithm

        class Doubled(WrappedAlgorithm):
            num_seen = 0

            def loss(self, track: Any, replay: Any, *, progress: float) -> Losses:
                losses = super().loss(track, replay, progress=progress)
                self.num_seen += 1
                return losses if self.num_seen % len(self.sums) == 0 else scaled(losses, 2)

        return super().train([Job(track=track, algorithm=Doubled(algorithm))], progress=progress)


@mutant(claim="a-run-resumes-exactly", name="forgets", breaks="rounds the weights to bf16 on resume")
class RoundsOnResume(Wrapped):
    def load(self, folder: Path) -> None:
        super().load(folder)
        update = self.inner.export_weights(kind=self.config.trains)
        rounded = {name: value.bfloat16().float() for name, value in update.tensors.items()}
        self.inner.adopt(with_tensors(update, rounded))


@mutant(claim="first-update-in-process-has-ratio-1", name="moves-anchor", breaks="moves the old log-probs by 1e-6")
class MovesItsAnchor(Wrapped):
    """Old log-probs are a little off by the time that the loss sees them."""

    def train(self, jobs: Sequence[Job], *, progress: float) -> TrainReport:
        track, algorithm = jobs[0].track, jobs[0].algorithm

        def with_old_log_probs(track: Track, forward: Forward) -> Track:
            result = algorithm.with_old_log_probs(track, forward)
            assert result.latent.log_probs is not None
            segment = dataclasses.replace(result.latent, log_probs=result.latent.log_probs + 1e-6)
            return dataclasses.replace(result, segment=segment)

        moved: Any = SimpleNamespace(
            with_old_log_probs=with_old_log_probs, loss_weights=algorithm.loss_weights, loss=algorithm.loss
        )
        return super().train([Job(track=track, algorithm=moved)], progress=progress)


@mutant(
    claim="log-probs-of-the-engine-are-those-of-training",
    name="replays-off",
    breaks="compares with log-probs of the engine that are 1e-5 off",
)
class ReplaysOtherwise(Wrapped):
    """The engine's log-probs are off by the same little each time that they are compared with its own."""

    off = 1e-5

    def train(self, jobs: Sequence[Job], *, progress: float) -> TrainReport:
        track, algorithm = jobs[0].track, jobs[0].algorithm
        return super().train([Job(track=self.moved(track), algorithm=algorithm)], progress=progress)

    def moved(self, track: Track) -> Track:
        assert track.latent.log_probs is not None
        segment = dataclasses.replace(track.latent, log_probs=track.latent.log_probs + self.off)
        return dataclasses.replace(track, segment=segment)


@mutant(
    claim="options-on-other-policies-change-the-loss",
    name="one-policy",
    breaks="takes the live weights for the reference policy",
)
class HasOnePolicy(Wrapped):
    """Gives the live weights whatever policy is asked for."""

    def train(self, jobs: Sequence[Job], *, progress: float) -> TrainReport:
        track, algorithm = jobs[0].track, jobs[0].algorithm
        return super().train([Job(track=track, algorithm=LiveAlone(algorithm))], progress=progress)

    def with_reference(self, track: Track, *, policy: Policy = "reference") -> Track:
        return super().with_reference(track, policy="live")

    @contextmanager
    def policy(self, which: Policy = "live") -> Iterator[None]:
        with contextlib.nullcontext():
            yield


BROKEN = mutants_in(__name__)
MUTANTS = list(BROKEN.values())


def build(config: Any, *, model: Any, train: Any, steps: int, seed: int) -> Wrapped:
    """The backend that the config's `use` names."""
    kind = next(kind for kind, mutant in BROKEN.items() if mutant.name == config.use)
    return kind(config, model=model, train=train, steps=steps, seed=seed)


def catalog() -> Catalog:
    broken = [dataclasses.replace(SPEC, name=mutant.name, build=f"{__name__}:build") for mutant in MUTANTS]
    return Catalog.of(
        {
            # One algorithm: they are broken with any, and each more is a cell more for every one of them.
            "unirl-well": SimpleNamespace(
                unirl_models=hookimpl(lambda: [latent_model.SPEC]),
                unirl_algorithms=hookimpl(lambda: [FLOW_GRPO]),
                unirl_backends=hookimpl(lambda: [SPEC]),
            ),
            "unirl-trainside": trainside,
            "unirl-mutants": SimpleNamespace(unirl_backends=hookimpl(lambda: broken)),
        }
    )
