"""The healthy backend, called from outside only: the changes are not inside its own code, so any backend would
do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor
from unirl.backends.fsdp2.plugin import SPEC as FSDP2
from unirl.core.roles import Job, Losses, Policy, TrainReport, WeightUpdate
from unirl.core.specs.capability import Cap
from unirl.core.types.weights import joined, tensor_digests

from conformance_mutants.changes import Change, Proxy, changed
from conformance_mutants.mutant import Mutant

SPEC = dataclasses.replace(FSDP2, build=f"{__name__}:Wrapped")
FULL = (Cap.TRAIN_FULL,)
LORA = (Cap.TRAIN_LORA, Cap.REFERENCE_ADAPTER_OFF)


def backend(name: str, claim: str, breaks: str, promises: tuple[Cap, ...] = FULL, **differences: Any) -> Mutant:
    """promises: the capabilities that its claim needs; it has no others, so that all claims about it take seconds."""
    stated = {cap for cap in SPEC.capabilities if cap in promises}
    spec = dataclasses.replace(SPEC, build=differences.pop("build", SPEC.build), capabilities=stated)
    return Mutant(name=name, claim=claim, breaks=breaks, spec=spec, **differences)


class Wrapped(Proxy):
    """Fits `unirl.core.roles.Backend`."""

    def __init__(self, config: Any, *, model: Any, train: Any, steps: int, seed: int) -> None:
        self.config, self.model, self.train_config = config, model, train
        self.was_training, self.dtype = model.trainable.training, next(model.trainable.parameters()).dtype
        """Mode and dtype of the model before the backend had it."""
        self.kept: dict[str, dict[str, Tensor]] = {}
        """Whole weights of policies that are not those of the healthy backend."""
        self._build = lambda: resolve_name(FSDP2.build)(config, model=model, train=train, steps=steps, seed=seed)
        super().__init__(self._build())

    @contextmanager
    def policy(self, which: Policy = "live") -> Iterator[None]:
        kept = self.kept.get(which)
        with self.inner.policy(which) if kept is None else self.holding(kept):
            yield

    def export_weights(self, *, policy: Policy = "live", kind: Any, dtypes: Any = None) -> WeightUpdate:
        update = self.inner.export_weights(policy=policy, kind=kind, dtypes=dtypes)
        return with_tensors(update, self.kept[policy]) if policy in self.kept else update

    # Looked up when they are called: `restart` is called after them and replaces the healthy backend.
    def load(self, folder: Path) -> None:
        self.inner.load(folder)

    def onload(self) -> None:
        self.inner.onload()

    def trained(self) -> dict[str, Tensor]:
        """The parameters that train, by their names in the module."""
        return {name: param for name, param in self.model.trainable.named_parameters() if param.requires_grad}

    @contextmanager
    def holding(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """The module computes with these inside the block. tensors: by the names of the plain module."""
        params = {name.replace(".base_layer", ""): param for name, param in self.model.trainable.named_parameters()}
        before = copies({name: params[name] for name in tensors})
        put(params, tensors)
        try:
            yield
        finally:
            put(params, before)

    def restart(self) -> None:
        """Keep all weights and the version, and nothing else. Only for training of all weights."""
        weights = self.inner.export_weights(kind="full")
        self.inner.close()
        self.inner = self._build()
        self.inner.adopt(weights)


def each_job(change: Callable[[Any, Job], Mapping[str, Any]]) -> dict[str, Change]:
    """Trains on jobs with other fields. change: gets the backend and a job."""

    def train(backend: Wrapped, train: Any, jobs: Sequence[Job], *, progress: float) -> TrainReport:
        return train([dataclasses.replace(job, **change(backend, job)) for job in jobs], progress=progress)

    return {"train": train}


def each_track(change: Callable[[Any, Any], Mapping[str, Any]]) -> dict[str, Change]:
    """Trains on tracks with other fields. change: gets the backend and a track."""
    return each_job(lambda backend, job: {"track": dataclasses.replace(job.track, **change(backend, job.track))})


def each_algorithm(changes: Mapping[str, Change]) -> dict[str, Change]:
    """Trains by algorithms with these methods changed."""
    return each_job(lambda _, job: {"algorithm": changed(Proxy(job.algorithm), changes)})


class LiveForward(Proxy):
    """Computes with the live weights, whatever policy is asked for."""

    def __call__(self, track: Any, *, policy: Any = "live") -> Any:
        return self.inner(track)

    def velocity(self, track: Any, x: Any, sigma: Any, *, policy: Any = "live", guided: bool = False) -> Any:
        return self.inner.velocity(track, x, sigma, guided=guided)


LIVE_ALONE: dict[str, Change] = {
    "with_old_log_probs": lambda _, anchor, track, forward: anchor(track, LiveForward(forward)),
    "loss": lambda _, loss, track, forward, *, progress: loss(track, LiveForward(forward), progress=progress),
}
"""An algorithm that gets the live policy's numbers, whatever policy it asks for."""


def scaled(losses: Losses, factor: float) -> Losses:
    """The same with every term this many times as large."""
    terms = [dataclasses.replace(term, scale=term.scale * factor) for term in losses.terms]
    return dataclasses.replace(losses, terms=terms)


@torch.no_grad()
def put(params: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    for name, value in tensors.items():
        params[name].copy_(value)


def copies(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in params.items()}


def with_tensors(update: WeightUpdate, tensors: Mapping[str, Tensor]) -> WeightUpdate:
    """The same update of other tensors, with the checksum of those."""
    digests = tensor_digests(tensors)
    return dataclasses.replace(update, tensors=tensors, digests=digests, checksum=joined(digests.values()))


def exports(change: Callable[[Any, Mapping[str, Tensor]], Mapping[str, Tensor]]) -> dict[str, Change]:
    """Other exported weights, with their checksum. change: gets the backend and the healthy ones."""

    def export_weights(part: Wrapped, export_weights: Any, **asked: Any) -> WeightUpdate:
        update = export_weights(**asked)
        return with_tensors(update, change(part, update.tensors))

    return {"export_weights": export_weights}


def is_enabled(backend: Wrapped, cap: Cap) -> bool:
    """Whether its config has what the spec says enables a capability."""
    return all(attrgetter(key)(backend.config) == value for key, value in SPEC.enabled_by[cap].items())


def change_gradients(backend: Wrapped, change: Callable[[Tensor], object]) -> None:
    """Have `change` change a parameter's gradient in place, after every backward."""

    def after(param: Tensor) -> None:
        if param.grad is not None:
            change(param)

    for param in backend.trained().values():
        param.register_post_accumulate_grad_hook(after)
