"""Cells of text of which one part is broken in one way each, next to those that are well: an engine that shares the
weights, one that is sent them, and backends."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from unirl.algorithms.grpo import plugin as grpo
from unirl.conformance.doubles import text_model
from unirl.conformance.doubles.text_model import TextWorkbenchModel
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.hookspec import hookimpl
from unirl.core.roles import Engine, Forward, Job, TrainReport, WeightReceipt, WeightUpdate
from unirl.core.specs.capability import Cap
from unirl.core.types.track import Track
from unirl.engines.trainside.engine import TrainsideEngine
from unirl.engines.trainside.plugin import SPEC as TRAINSIDE
from unirl.numerics.tokens.replay import replay_text

from conformance_mutants import cell
from conformance_mutants.backend_wrapped import SPEC as FSDP2
from conformance_mutants.backend_wrapped import Wrapped
from conformance_mutants.engine_copying import SPEC as COPYING
from conformance_mutants.engine_copying import CopyingEngine
from conformance_mutants.mutant import mutant, mutants_in

SHARING = dataclasses.replace(TRAINSIDE, kernels=(), capabilities=TRAINSIDE.capabilities - {Cap.LATENT_ROLLOUT})
SENT = dataclasses.replace(
    COPYING,
    name="sent",
    build=f"{__name__}:build_sent",
    kernels=(),
    capabilities=COPYING.capabilities - {Cap.LATENT_ROLLOUT},
)
"""An engine with weights of its own, as one in another process has."""
GAPS, NEWEST = "log-probs-of-the-engine-are-those-of-training", "second-rollout-is-made-with-the-new-weights"


@mutant(claim=NEWEST, name="keeps-weights", breaks="is sent weights and goes on with those it had", also=(GAPS,))
class KeepsItsWeights(CopyingEngine):
    """Answers that it holds what was sent, and samples from what it was built with."""

    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        held = {name: weight.detach().clone() for name, weight in self._module.named_parameters()}
        receipt = super().load_weights(update)
        with torch.no_grad():
            for name, weight in self._module.named_parameters():
                weight.copy_(held[name])
        return receipt


class Rescored(TrainsideEngine):
    """Gives other log-probs than those of the policy that sampled."""

    def _text(self, request: Any) -> Track:
        track = super()._text(request)
        return dataclasses.replace(track, segment=dataclasses.replace(track.text, log_probs=self.scored(track)))

    def scored(self, track: Track) -> tuple[Tensor, ...]:
        raise NotImplementedError


@mutant(claim=GAPS, name="raw-logits", breaks="gives log-probs of raw logits in rounds of text")
class ScoresRawLogits(Rescored):
    """Log-probs of the logits as they are, whatever the temperature."""

    def scored(self, track: Track) -> tuple[Tensor, ...]:
        model: Any = self._model
        raw = dataclasses.replace(track, segment=dataclasses.replace(track.text, temperature=1.0))
        log_probs = replay_text(model, raw, packing=False).log_probs
        return tuple(row[:length] for row, length in zip(log_probs, track.text.lengths, strict=True))


@mutant(claim=GAPS, name="swaps-rows", breaks="swaps the log-probs of texts in rounds")
class SwapsItsRows(Rescored):
    """Gives the log-probs of a group's texts in the order in which they ended."""

    def scored(self, track: Track) -> tuple[Tensor, ...]:
        assert track.text.log_probs is not None
        by_length = sorted(track.text.log_probs, key=len)
        whole = torch.cat(by_length)
        return tuple(whole.split(list(track.text.lengths)))


@mutant(claim=GAPS, name="one-late", breaks="gives log-probs one token late in rounds")
class ScoresOneTokenLate(Rescored):
    def scored(self, track: Track) -> tuple[Tensor, ...]:
        assert track.text.log_probs is not None
        return tuple(row.roll(1) for row in track.text.log_probs)


class MovesItsTextAnchor(Wrapped):
    """Old log-probs are a little off by the time that the loss sees them."""

    def train(self, jobs: Sequence[Job], *, progress: float) -> TrainReport:
        track, algorithm = jobs[0].track, jobs[0].algorithm

        def with_old_log_probs(track: Track, forward: Forward) -> Track:
            result = algorithm.with_old_log_probs(track, forward)
            assert result.text.log_probs is not None
            off = tuple(row + 1e-6 for row in result.text.log_probs)
            return dataclasses.replace(result, segment=dataclasses.replace(result.text, log_probs=off))

        moved: Any = SimpleNamespace(
            with_old_log_probs=with_old_log_probs, loss_weights=algorithm.loss_weights, loss=algorithm.loss
        )
        return super().train([Job(track=track, algorithm=moved)], progress=progress)


class ReplaysTextOtherwise(cell.ReplaysOtherwise):
    off = 1e-3

    def moved(self, track: Track) -> Track:
        assert track.text.log_probs is not None
        off = tuple(row + self.off for row in track.text.log_probs)
        return dataclasses.replace(track, segment=dataclasses.replace(track.text, log_probs=off))


ENGINES = mutants_in(__name__)
OF_TEXT = {cell.MovesItsAnchor: MovesItsTextAnchor, cell.ReplaysOtherwise: ReplaysTextOtherwise}
BACKENDS = {
    OF_TEXT.get(kind, kind): dataclasses.replace(
        mutant, name=f"text-{mutant.name}", breaks=mutant.breaks.replace("1e-5", "1e-3")
    )
    for kind, mutant in cell.BROKEN.items()
}
"""What is wrong in rounds of latents is wrong in those of text."""
MUTANTS = [
    *ENGINES.values(),
    *(dataclasses.replace(mutant, breaks=f"in rounds of text {mutant.breaks}") for mutant in BACKENDS.values()),
]


# What is sent weights begins with those of the miniature, whatever the backend has put into the model that trains.
def build_sent(config: Any, *, model: Any, device: Any) -> CopyingEngine:
    return CopyingEngine(config, model=TextWorkbenchModel(device=device))


def build_engine(config: Any, *, model: Any, device: Any) -> Engine:
    """The engine that the config's `use` names."""
    kind: Any = next(kind for kind, mutant in ENGINES.items() if mutant.name == config.use)
    is_sent = issubclass(kind, CopyingEngine)
    return kind(config, model=TextWorkbenchModel(device=device) if is_sent else model)


def build_backend(config: Any, *, model: Any, train: Any, steps: int, seed: int) -> Any:
    """The backend that the config's `use` names."""
    kind = next(kind for kind, mutant in BACKENDS.items() if mutant.name == config.use)
    return kind(config, model=model, train=train, steps=steps, seed=seed)


def broken_engines() -> Catalog:
    """The engines that are broken, and those that are well, with the backend that is."""
    engines = [
        dataclasses.replace(
            SENT if issubclass(kind, CopyingEngine) else SHARING, name=mutant.name, build=f"{__name__}:build_engine"
        )
        for kind, mutant in ENGINES.items()
    ]
    return _catalog([SHARING, SENT, *engines], [FSDP2])


def broken_backends() -> Catalog:
    """The backends that are broken, with an engine that shares their weights."""
    backends = [
        dataclasses.replace(FSDP2, name=mutant.name, build=f"{__name__}:build_backend") for mutant in BACKENDS.values()
    ]
    return _catalog([SHARING], backends)


def _catalog(engines: Any, backends: Any) -> Catalog:
    algorithms = [spec for spec in grpo.unirl_algorithms() if spec.name == "grpo"]
    return Catalog.of(
        {
            "unirl-text-cells": SimpleNamespace(
                unirl_models=hookimpl(lambda: [text_model.SPEC]),
                unirl_engines=hookimpl(lambda: engines),
                unirl_algorithms=hookimpl(lambda: algorithms),
                unirl_backends=hookimpl(lambda: backends),
            )
        }
    )
