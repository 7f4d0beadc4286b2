"""Cells of which one part is broken in one way each, next to the one that is well.

The broken part is always the backend: it sees everything that passes, and parts that are broken in two places would
meet in cells of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor
from unirl.algorithms.flow_grpo import plugin as flow_grpo
from unirl.backends.fsdp2.backend import Fsdp2Backend
from unirl.backends.fsdp2.plugin import SPEC
from unirl.conformance.workbench import model as workbench
from unirl.core.catalog import Catalog
from unirl.core.hookspec import hookimpl
from unirl.core.roles import Algorithm, Policy, Replay, TrainReport, WeightUpdate
from unirl.core.track import Track
from unirl.engines.trainside import plugin as trainside

from conformance_mutants.mutant import Mutant


class CannotCount(Fsdp2Backend):
    """Reports a number that is none, under one way of training."""

    training: str

    def train(self, track: Track, algorithm: Algorithm, *, progress: float) -> TrainReport:
        report = super().train(track, algorithm, progress=progress)
        norm = math.nan if self._config.trains == self.training else report.metrics["grad_norm"]
        return dataclasses.replace(report, metrics={**report.metrics, "grad_norm": norm})


class CannotCountAdapters(CannotCount):
    training = "lora"


class CannotCountAllWeights(CannotCount):
    training = "full"


class TrainsACopy(Fsdp2Backend):
    """Hands out trained weights, and leaves those of the module, from which is sampled, as they were."""

    _trained: Mapping[str, Tensor] | None = None

    def train(self, track: Track, algorithm: Algorithm, *, progress: float) -> TrainReport:
        before = {name: param.detach().clone() for name, param in self._params.items()}
        report = super().train(track, algorithm, progress=progress)
        self._trained = self._swapped(before)
        return report

    def weights(self, *, policy: Policy = "live", kind: Literal["full", "lora", "merged"]) -> WeightUpdate:
        if self._trained is None:
            return super().weights(policy=policy, kind=kind)
        untrained = self._swapped(self._trained)
        try:
            return super().weights(policy=policy, kind=kind)
        finally:
            self._swapped(untrained)

    @torch.no_grad()
    def _swapped(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Put these into the module; returns what was there."""
        there = {name: param.detach().clone() for name, param in self._params.items()}
        for name, param in self._params.items():
            param.copy_(values[name])
        return there


class CountsMicroBatchesTwice(Fsdp2Backend):
    """All but the last micro-batch of an update weigh double."""

    def __init__(self, *positional: Any, **settings: Any) -> None:
        super().__init__(*positional, **settings)
        plain = self._updater.backward
        self._updater.backward = lambda loss, *, last: plain(loss if last else 2 * loss, last=last)


class ForgetsItsMoments(Fsdp2Backend):
    def load(self, folder: Path) -> None:
        super().load(folder)
        self._optimizer.adam.state.clear()


class MovesItsAnchor(Fsdp2Backend):
    """Old log-probs are a little off by the time that the loss sees them."""

    def train(self, track: Track, algorithm: Algorithm, *, progress: float) -> TrainReport:
        def anchor(track: Track, replay: Replay) -> Track:
            found = algorithm.anchor(track, replay)
            assert found.latent.log_probs is not None
            segment = dataclasses.replace(found.latent, log_probs=found.latent.log_probs + 1e-6)
            return dataclasses.replace(found, segment=segment)

        moved: Any = SimpleNamespace(anchor=anchor, weights=algorithm.weights, loss=algorithm.loss)
        return super().train(track, moved, progress=progress)


class ReplaysOtherwise(Fsdp2Backend):
    """Its replay is off by the same little each time."""

    off = 1e-5

    def __init__(self, *positional: Any, **settings: Any) -> None:
        super().__init__(*positional, **settings)
        plain = self._replay

        def replay(track: Track, *, policy: Policy = "live") -> Any:
            found = plain(track, policy=policy)
            return dataclasses.replace(found, log_probs=found.log_probs + self.off)

        self._replay: Any = replay


class HasOnePolicy(Fsdp2Backend):
    """Gives the live weights whatever policy is asked for."""

    @contextmanager
    def policy(self, which: Policy = "live") -> Iterator[None]:
        with contextlib.nullcontext():
            yield


BROKEN: dict[type[Fsdp2Backend], Mutant] = {
    CannotCountAdapters: Mutant(
        claim="a-round-trains-adapters", name="counts-no-adapters", broken="reports NaN where it trains adapters"
    ),
    CannotCountAllWeights: Mutant(
        claim="a-round-trains-all-weights", name="counts-no-weights", broken="reports NaN where it trains all weights"
    ),
    TrainsACopy: Mutant(
        claim="second-rollout-is-made-with-the-new-weights",
        name="trains-a-copy",
        broken="trains a copy of what is sampled from",
        # What never moves stays where the reference policy is.
        also=("options-that-need-another-policy-change-what-is-learnt",),
    ),
    CountsMicroBatchesTwice: Mutant(
        claim="micro-batches-of-a-round-give-the-same-update",
        name="counts-twice",
        broken="counts all but the last micro-batch twice",
    ),
    ForgetsItsMoments: Mutant(
        claim="a-run-resumes-exactly", name="forgets", broken="forgets the optimizer's moments on resume"
    ),
    MovesItsAnchor: Mutant(
        claim="first-update-in-process-has-ratio-1", name="moves-anchor", broken="moves the old log-probs by 1e-6"
    ),
    ReplaysOtherwise: Mutant(
        claim="log-probs-of-the-engine-are-those-of-training", name="replays-off", broken="replays 1e-5 off"
    ),
    HasOnePolicy: Mutant(
        claim="options-that-need-another-policy-change-what-is-learnt",
        name="one-policy",
        broken="takes the live weights for the reference policy",
    ),
}
MUTANTS = list(BROKEN.values())


def build(config: Any, *, model: Any, train: Any, steps: int, seed: int) -> Fsdp2Backend:
    """The backend that the config's `use` names."""
    kind = next(kind for kind, mutant in BROKEN.items() if mutant.name == config.use)
    return kind(config, model=model, train=train, steps=steps, seed=seed)


def catalog() -> Catalog:
    broken = [dataclasses.replace(SPEC, name=mutant.name, build=f"{__name__}:build") for mutant in MUTANTS]
    return Catalog.of(
        {
            "unirl-well": SimpleNamespace(
                unirl_models=hookimpl(lambda: [workbench.SPEC]), unirl_backends=hookimpl(lambda: [SPEC])
            ),
            "unirl-flow-grpo": flow_grpo,
            "unirl-trainside": trainside,
            "unirl-mutants": SimpleNamespace(unirl_backends=hookimpl(lambda: broken)),
        }
    )
