"""An algorithm with a rollout to learn from, next to the small model that made it: what its claims work with."""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from unirl.core.capability import Needs
from unirl.core.config import PartConfig
from unirl.core.roles import Algorithm, LatentAlgorithm, Losses, Policy, Replay, TrainReport
from unirl.core.track import Track
from unirl.numerics.reduction import LossTerm, reduce_terms, weight_totals
from unirl.numerics.stack import train_on
from unirl.numerics.track_replay import TrackReplay

from ..workbench.model import WorkbenchModel
from ..workbench.text_model import TextWorkbenchModel
from ..workbench.updates import PlainUpdater

__all__ = ["CLIP", "POLICIES", "AlreadyAnchored", "FrozenPolicies", "Trial", "TrialModel", "apart", "digest"]

CLIP = 0.05
"""Clip range of trials. A clip decides differences of its own size; at this one they stand far above fp32 rounding."""

POLICIES: tuple[Policy, ...] = ("reference", "ema", "lagged")
"""Those that are frozen copies."""

TrialModel = WorkbenchModel | TextWorkbenchModel


@dataclass(frozen=True, kw_only=True)
class Trial:
    """An algorithm with a rollout to learn from."""

    algorithm: Algorithm
    config: PartConfig
    needs: Needs
    model: TrialModel
    policies: FrozenPolicies
    track: Track
    """With rewards and advantages; the log-probs are the engine's. Groups of 4, 3 and 4."""
    sizes: dict[str, float] = field(default_factory=dict)
    """How far `move` went in trials of other algorithms, by what decides it."""

    @property
    def is_text(self) -> bool:
        return isinstance(self.model, TextWorkbenchModel)

    @property
    def has_log_probs(self) -> bool:
        """Whether anything of the rollout was drawn, so that samples have a log-prob."""
        return self.is_text or bool(self.track.latent.sde_steps.numel())

    def replay(self, *, stacked: bool = True, packing: bool = True) -> TrackReplay:
        return TrackReplay(self.model, stacked=stacked, packing=packing, policy_context=self.policies)

    def anchored(self, track: Track | None = None, replay: Replay | None = None) -> Track:
        """The track (or another one) with what the updates compare with, under the weights as they are now."""
        with torch.no_grad():
            return self.algorithm.anchor((track or self.track).to(self.model.device), replay or self.replay())

    def log_probs(self, track: Track | None = None) -> Tensor:
        """[n, S] under the weights as they are now; 0 where a row has no step, or no token that counts."""
        return self._replayed(track)[0]

    def mean_log_probs(self) -> Tensor:
        """[n] under the weights as they are now, each the mean over the steps or tokens of a row, on the CPU."""
        log_probs, valid = self._replayed()
        return (log_probs.sum(dim=1) / valid.sum(dim=1).clamp(min=1)).cpu()

    def _replayed(self, track: Track | None = None) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            found = self.replay()((track or self.track).to(self.model.device))
        return found.log_probs, found.valid

    def move(self, distance: float = CLIP) -> None:
        """Move the live weights at random, until half of the log-probs have changed by more than `distance`.

        Where nothing is stochastic there are no log-probs, and the weights move by a twentieth of their size.
        """
        random = torch.Generator().manual_seed(5)
        start = [(param, param.detach().clone()) for param in self.model.net.parameters()]
        ways = [torch.randn(value.shape, generator=random).to(value.device) for _, value in start]
        if not self.has_log_probs:
            _put(start, [0.05 * value.abs().mean() * way for (_, value), way in zip(start, ways, strict=True)])
            return
        # A dozen forwards, for a number that is the same for every algorithm with this rollout.
        key = digest([value for _, value in start], self.track.segment, self.track.conditions, distance)
        if key not in self.sizes:
            self.sizes[key] = self._size(start, ways, distance)
        _put(start, [self.sizes[key] * way for way in ways])

    def _size(self, start: Sequence[tuple[Tensor, Tensor]], ways: Sequence[Tensor], distance: float) -> float:
        """How far to go along `ways` for half of the log-probs to change by `distance`, to a tenth of it."""
        before, valid = self._replayed()
        size = 1e-3
        for _ in range(20):
            _put(start, [size * way for way in ways])
            found = float((self.log_probs() - before)[valid].abs().median())
            if abs(found / distance - 1) < 0.1:
                return size
            # The change is linear at first and quadratic later; a root of the quotient overshoots in neither.
            size *= (distance / found) ** 0.5
        raise AssertionError(f"the workbench model could not be moved by {distance}; this is a defect of the kit")

    def loss(self, track: Track, *, progress: float = 0.0, replay: Replay | None = None) -> tuple[Tensor, Losses]:
        """The loss of all rows of an anchored track as one micro-batch, and what the algorithm returned for it."""
        there = track.to(self.model.device)
        losses = self.algorithm.loss(there, replay or self.replay(), progress=progress)
        terms = cast(Sequence[LossTerm], losses.terms)
        return reduce_terms(terms, totals=_cpu(weight_totals(self.algorithm.weights(there)))), losses

    def gradient(self, track: Track, *, progress: float = 0.0, replay: Replay | None = None) -> dict[str, Tensor]:
        """The gradient of `loss`, name of each weight -> tensor."""
        updater = PlainUpdater(self.model.net)
        updater.zero_grad()
        updater.backward(self.loss(track, progress=progress, replay=replay)[0], last=True)
        updater.step()
        return updater.gradients

    def train(
        self,
        track: Track,
        *,
        algorithm: Algorithm | None = None,
        replay: Replay | None = None,
        micro_batch: int = 0,
        micro_batch_tokens: int = 0,
        packing: bool = True,
        progress: float = 0.0,
        lr: float = 0.0,
    ) -> tuple[TrainReport, dict[str, Tensor]]:
        """One update by the train stack, gradient descent with `lr`; its report and its gradient.

        algorithm: `AlreadyAnchored` for a track that is; the default anchors it now.
        """
        updater = PlainUpdater(self.model.net, lr=lr)
        report = train_on(
            track,
            algorithm or self.algorithm,
            replay=replay or self.replay(packing=packing),
            updates=1,
            micro_batch=micro_batch,
            micro_batch_tokens=micro_batch_tokens,
            packing=packing,
            progress=progress,
            apply=updater,
        )
        return report, updater.gradients


class AlreadyAnchored:
    """An algorithm whose anchor pass has been, so that the stack can train with weights that moved since."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm

    def latent_request(self, *args: Any, **kwargs: Any) -> Any:
        return cast("LatentAlgorithm", self._algorithm).latent_request(*args, **kwargs)

    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        return self._algorithm.advantages(track)

    def anchor(self, track: Track, replay: Replay) -> Track:
        return track

    def weights(self, track: Track) -> Mapping[str, Tensor]:
        return self._algorithm.weights(track)

    def loss(self, track: Track, replay: Replay, *, progress: float) -> Losses:
        return self._algorithm.loss(track, replay, progress=progress)


def apart(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Distance of two gradients as a share of the norm of the second; infinite when one has a number that is none."""
    assert one.keys() == other.keys()
    squares = sum(float((one[name] - other[name]).double().square().sum()) for name in one)
    norm = sum(float(other[name].double().square().sum()) for name in other)
    assert norm > 0, "the gradient is 0 all over, so there is nothing to compare"
    return (squares / norm) ** 0.5 if squares == squares else float("inf")


def digest(*what: object) -> str:
    """Names what can be pickled, tensors by their numbers: equal things have one name, whoever made them."""
    data = io.BytesIO()
    pickler = _ByContent(data)
    # What stands twice is written twice, whether or not it is the same object.
    pickler.fast = True
    pickler.dump(what)
    return hashlib.blake2b(data.getbuffer(), digest_size=16).hexdigest()


class _ByContent(pickle.Pickler):
    """Writes tensors without the addresses that torch's own way has in it."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        plain = obj.detach().cpu().contiguous()
        return bytes, (plain.flatten().view(torch.uint8).numpy().tobytes(), str(obj.dtype), tuple(obj.shape))


def _put(start: Sequence[tuple[Tensor, Tensor]], shifts: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for (param, value), shift in zip(start, shifts, strict=True):
            param.copy_(value + shift)


def _cpu(totals: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: total.cpu() for name, total in totals.items()}


class FrozenPolicies:
    """Frozen copies of the model under the names of policies, each a little elsewhere. Fits `Backend.policy`."""

    def __init__(self, model: TrialModel, allowed: Collection[Policy]) -> None:
        self._model = model
        self._start = [value.detach().clone() for value in model.net.parameters()]
        self._copies: dict[str, torch.nn.Module] = {}
        self._allowed = allowed

    @contextmanager
    def __call__(self, which: Policy = "live") -> Generator[None]:
        if which == "live":
            yield
            return
        assert which in self._allowed, f"the loss asks for the policy {which!r}, which the spec's needs do not name"
        # Swapped, not loaded over the live weights: those belong to a graph that backward still has to walk.
        model: Any = self._model
        if which not in self._copies:
            self._copies[which] = self._copied(which)
        live, model.net = model.net, self._copies[which]
        try:
            yield
        finally:
            model.net = live

    def _copied(self, which: Policy) -> torch.nn.Module:
        """Made when it is asked for, from the weights of the start: few trials need any of them."""
        frozen = copy.deepcopy(self._model.net).requires_grad_(False)
        random = torch.Generator().manual_seed(POLICIES.index(which))
        for value, start in zip(frozen.parameters(), self._start, strict=True):
            value.copy_(start + 0.03 * torch.randn(value.shape, generator=random).to(value.device))
        return frozen
