"""Broken backends are the one that is well with some methods of its role changed, so that any backend would do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from unirl.backends.fsdp2.plugin import SPEC
from unirl.conformance.doubles.forward import SameForward
from unirl.core.plugins.catalog import Catalog
from unirl.core.roles import Job, Losses, Policy, TrainReport, WeightUpdate
from unirl.core.specs.capability import Cap
from unirl.core.types.track import Track
from unirl.core.types.weights import joined, tensor_digests

__all__ = [
    "SPEC",
    "LiveAlone",
    "ShiftsSigmas",
    "Wrapped",
    "WrappedAlgorithm",
    "change_gradients",
    "is_enabled",
    "put",
    "scaled",
    "with_tensors",
]


class Wrapped:
    """The backend that is well, called from outside alone. Fits `unirl.core.roles.Backend`."""

    def __init__(self, config: Any, *, model: Any, train: Any, steps: int, seed: int) -> None:
        self.config, self.model, self.train_config = config, model, train
        self.kept: dict[Policy, dict[str, Tensor]] = {}
        """Whole weights of policies that are not those of the backend inside."""
        self._build: Callable[..., Any] = Catalog.of({}).resolve(SPEC.build)
        self._context = {"model": model, "train": train, "steps": steps, "seed": seed}
        self.inner = self._build(config, **self._context)

    @property
    def version(self) -> int:
        return self.inner.version

    def version_of(self, policy: Policy = "live") -> int:
        return self.version if policy == "live" else self.inner.version_of(policy)

    @contextmanager
    def policy(self, which: Policy = "live") -> Iterator[None]:
        kept = self.kept.get(which)
        with self.inner.policy(which) if kept is None else self.holding(kept):
            yield

    def train(self, jobs: Sequence[Job], *, progress: float) -> TrainReport:
        return self.inner.train(jobs, progress=progress)

    def with_reference(self, track: Track, *, policy: Policy = "reference") -> Track:
        return self.inner.with_reference(track, policy=policy)

    def with_values(self, track: Track) -> Track:
        return self.inner.with_values(track)

    def hold_frozen(self, model: Any) -> None:
        self.inner.hold_frozen(model)

    def export_weights(self, *, policy: Policy = "live", kind: Any) -> WeightUpdate:
        update = self.inner.export_weights(policy=policy, kind=kind)
        return with_tensors(update, self.kept[policy]) if policy in self.kept else update

    def adopt(self, update: WeightUpdate) -> None:
        self.inner.adopt(update)

    def save(self, folder: Path) -> None:
        self.inner.save(folder)

    def load(self, folder: Path) -> None:
        self.inner.load(folder)

    def end_rollout(self) -> None:
        self.inner.end_rollout()

    def offload(self) -> None:
        self.inner.offload()

    def onload(self) -> None:
        self.inner.onload()

    def close(self) -> None:
        self.inner.close()

    def trained(self) -> dict[str, Tensor]:
        """The parameters that train, by their names in the module."""
        return {name: param for name, param in self.model.trainable.named_parameters() if param.requires_grad}

    @contextmanager
    def holding(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Have the module compute with these inside the block. tensors: by the names of the plain module."""
        params = {name.replace(".base_layer", ""): param for name, param in self.model.trainable.named_parameters()}
        there = {name: params[name].detach().clone() for name in tensors}
        put(params, tensors)
        try:
            yield
        finally:
            put(params, there)

    def start_anew(self) -> None:
        """Keep all weights and the version, and nothing else; of training of all weights."""
        weights = self.inner.export_weights(kind="full")
        self.inner.close()
        self.inner = self._build(self.config, **self._context)
        self.inner.adopt(weights)


class WrappedAlgorithm:
    """The algorithm, for backends that call it in a way of their own."""

    trains_critic = False

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.sums: list[float] = []
        """Weights of the rows of every micro-batch."""

    def with_old_log_probs(self, track: Any, replay: Any) -> Any:
        self.sums.append(float(track.sample_weights.sum()))
        return self.inner.with_old_log_probs(track, replay)

    def loss_weights(self, track: Any) -> Any:
        return self.inner.loss_weights(track)

    def loss(self, track: Any, replay: Any, *, progress: float) -> Losses:
        return self.inner.loss(track, replay, progress=progress)


class LiveAlone(WrappedAlgorithm):
    """Replays with the live weights, whatever policy is asked for."""

    def with_old_log_probs(self, track: Any, replay: Any) -> Any:
        return super().with_old_log_probs(track, _Live(replay))

    def loss(self, track: Any, replay: Any, *, progress: float) -> Losses:
        return super().loss(track, _Live(replay), progress=progress)


class ShiftsSigmas(WrappedAlgorithm):
    """Gets the velocity at another sigma than the one it asks for."""

    def loss(self, track: Any, replay: Any, *, progress: float) -> Losses:
        return super().loss(track, _Shifted(replay), progress=progress)


class _Shifted(SameForward):
    def velocity(self, track: Any, x: Any, sigma: Any, *, policy: Any = "live", guided: bool = False) -> Any:
        return super().velocity(track, x, sigma * 0.999, policy=policy, guided=guided)


class CutsInputs(WrappedAlgorithm):
    """Gets velocities that see their latents as constants."""

    def loss(self, track: Any, replay: Any, *, progress: float) -> Losses:
        return super().loss(track, _Cut(replay), progress=progress)


class _Cut(SameForward):
    def velocity(self, track: Any, x: Any, sigma: Any, *, policy: Any = "live", guided: bool = False) -> Any:
        return super().velocity(track, x.detach(), sigma, policy=policy, guided=guided)


class _Live(SameForward):
    def __call__(self, track: Any, *, policy: Any = "live") -> Any:
        return super().__call__(track)

    def velocity(self, track: Any, x: Any, sigma: Any, *, policy: Any = "live", guided: bool = False) -> Any:
        return super().velocity(track, x, sigma, guided=guided)


def scaled(losses: Losses, factor: float) -> Losses:
    """The same with every term this many times as large."""
    return dataclasses.replace(
        losses, terms=[dataclasses.replace(term, scale=term.scale * factor) for term in losses.terms]
    )


@torch.no_grad()
def put(params: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    for name, value in tensors.items():
        params[name].copy_(value)


def with_tensors(update: WeightUpdate, tensors: Mapping[str, Tensor]) -> WeightUpdate:
    """The same update of other tensors, with the checksum of those."""
    digests = tensor_digests(tensors)
    return dataclasses.replace(update, tensors=tensors, digests=digests, checksum=joined(digests.values()))


def is_enabled(config: Any, cap: Cap) -> bool:
    """Whether a config has what the spec says enables a capability."""
    return all(attrgetter(key)(config) == value for key, value in SPEC.enabled_by[cap].items())


def change_gradients(params: Mapping[str, Tensor], change: Callable[[Tensor], object]) -> None:
    """Have `change` change a parameter's gradient in place, after every backward."""

    def after(param: Tensor) -> None:
        if param.grad is not None:
            change(param)

    for param in params.values():
        param.register_post_accumulate_grad_hook(after)
