"""An algorithm with a rollout to learn from, next to the small model that made it: what its claims work with."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import io
import pickle
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from unirl.core.capability import Needs
from unirl.core.config import PartConfig
from unirl.core.roles import Algorithm, CriticAlgorithm, LatentAlgorithm, Losses, Metric, Policy, Replay, TrainReport
from unirl.core.track import TextSegment, Track
from unirl.numerics.critic import with_values
from unirl.numerics.reduction import LossTerm, reduce_terms, weight_totals
from unirl.numerics.stack import train_on
from unirl.numerics.text_replay import token_mask
from unirl.numerics.track_replay import TrackReplay

from ..workbench.critic import PlainCritic
from ..workbench.model import WorkbenchModel
from ..workbench.text_model import TextWorkbenchModel
from ..workbench.updates import PlainUpdater

__all__ = [
    "CLIP",
    "CRITIC",
    "POLICIES",
    "AlreadyAnchored",
    "FrozenPolicies",
    "SameAlgorithm",
    "Trial",
    "TrialModel",
    "apart",
    "digest",
    "of_policy",
]

CLIP = 0.05
"""Clip range of trials. A clip decides differences of its own size; at this one they stand far above fp32 rounding."""

VALUE_MOVE = 0.2
"""How far `move` takes half of the values of a critic: a usual clip range of theirs binds on some."""

CRITIC = "critic."
"""What names of a critic's weights and of its loss terms begin with here."""

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
    """With rewards, and advantages unless a critic makes them; the log-probs are the engine's. Groups of 4, 3 and 4."""
    critic: PlainCritic | None = None
    """Where the algorithm needs one. Its loss and its gradient are part of those below."""
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
            found = self.algorithm.anchor((track or self.track).to(self.model.device), replay or self.replay())
        return self.judged(found)[0]

    def judged(
        self, track: Track, sum_over_ranks: Callable[[Tensor], Tensor] = lambda values: values
    ) -> tuple[Track, Mapping[str, Metric]]:
        """An anchored track with what the algorithm makes of the values of its critic; as it is where there is none."""
        judge = self.judge
        if judge is None or self.critic is None:
            return track, {}
        return judge.after_anchor(with_values(track, self.critic), sum_over_ranks)

    @property
    def judge(self) -> CriticAlgorithm | None:
        """The algorithm, where it trains a critic."""
        if self.critic is None:
            return None
        assert isinstance(self.algorithm, CriticAlgorithm), (
            f"the spec needs a critic, and {type(self.algorithm).__name__} has not all of after_anchor(), "
            "critic_weights() and critic_loss(), see unirl.core.roles.CriticAlgorithm"
        )
        return self.algorithm

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

        Where nothing is stochastic there are no log-probs, and the weights move by a twentieth of their size. A critic
        moves until half of its values have changed by more than `VALUE_MOVE`.
        """
        if self.critic is not None:
            self._move_critic(self.critic)
        random = torch.Generator().manual_seed(5)
        start = [(param, param.detach().clone()) for param in self.model.net.parameters()]
        ways = [torch.randn(value.shape, generator=random).to(value.device) for _, value in start]
        if not self.has_log_probs:
            _put(start, [0.05 * value.abs().mean() * way for (_, value), way in zip(start, ways, strict=True)])
            return
        # A dozen forwards, for a number that is the same for every algorithm with this rollout.
        key = digest([value for _, value in start], self.track.segment, self.track.conditions, distance)
        if key not in self.sizes:
            valid = self._replayed()[1]
            self.sizes[key] = _size(start, ways, distance, lambda: self.log_probs()[valid])
        _put(start, [self.sizes[key] * way for way in ways])

    def _move_critic(self, critic: PlainCritic) -> None:
        random = torch.Generator().manual_seed(7)
        start = [(param, param.detach().clone()) for param in critic.net.parameters()]
        ways = [torch.randn(value.shape, generator=random).to(value.device) for _, value in start]
        key = digest("critic", [value for _, value in start], self.track.segment)
        if key not in self.sizes:
            there = self.track.to(self.model.device)
            valid = token_mask(there.text)

            def values() -> Tensor:
                with torch.no_grad():
                    return critic.values(there)[valid]

            self.sizes[key] = _size(start, ways, VALUE_MOVE, values)
        _put(start, [self.sizes[key] * way for way in ways])

    def weights(self, track: Track) -> dict[str, Tensor]:
        """What the algorithm announces for its terms, those of a critic's loss included."""
        found, judge = dict(self.algorithm.weights(track)), self.judge
        critics = {} if judge is None else judge.critic_weights(track)
        return {**found, **{f"{CRITIC}{name}": value for name, value in critics.items()}}

    def losses(self, track: Track, *, progress: float = 0.0, replay: Replay | None = None) -> Losses:
        """What the algorithm returns for all rows of an anchored track, that of a critic included."""
        there, judge = track.to(self.model.device), self.judge
        found = self.algorithm.loss(there, replay or self.replay(), progress=progress)
        if judge is None or self.critic is None:
            return found
        own = judge.critic_loss(there, self.critic.values(there), progress=progress)
        terms = [dataclasses.replace(cast(LossTerm, term), name=f"{CRITIC}{term.name}") for term in own.terms]
        return Losses(terms=[*found.terms, *terms], metrics={**found.metrics, **own.metrics})

    def loss(self, track: Track, *, progress: float = 0.0, replay: Replay | None = None) -> tuple[Tensor, Losses]:
        """The loss of all rows of an anchored track as one micro-batch, and what the algorithm returned for it."""
        losses = self.losses(track, progress=progress, replay=replay)
        totals = _cpu(weight_totals(self.weights(track.to(self.model.device))))
        return reduce_terms(cast(Sequence[LossTerm], losses.terms), totals=totals), losses

    def gradient(self, track: Track, *, progress: float = 0.0, replay: Replay | None = None) -> dict[str, Tensor]:
        """The gradient of `loss`, name of each weight -> tensor."""
        updaters = [PlainUpdater(self.model.net), *([] if self.critic is None else [self.critic])]
        for updater in updaters:
            updater.zero_grad()
        updaters[0].backward(self.loss(track, progress=progress, replay=replay)[0], last=True)
        for updater in updaters:
            updater.step()
        return self._gradients(updaters[0])

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
        critic_lr: float = 0.0,
    ) -> tuple[TrainReport, dict[str, Tensor]]:
        """One update by the train stack, gradient descent with `lr`; its report and its gradient.

        algorithm: `AlreadyAnchored` for a track that is; the default anchors it now.
        """
        updater = PlainUpdater(self.model.net, lr=lr)
        if self.critic is not None:
            self.critic.packing, self.critic.lr, self.critic.gradients = packing, critic_lr, {}
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
            critic=self.critic,
        )
        return report, self._gradients(updater)

    def _gradients(self, updater: PlainUpdater) -> dict[str, Tensor]:
        """Those of the last update, of the policy and of a critic."""
        critics = {} if self.critic is None else self.critic.gradients
        return {**updater.gradients, **{f"{CRITIC}{name}": value for name, value in critics.items()}}


class SameAlgorithm:
    """Does as another algorithm does: what those inherit that change one thing, or watch it."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        if isinstance(algorithm, CriticAlgorithm):
            # Only then, for the stack takes what has these for an algorithm with a critic.
            self.after_anchor, self.critic_weights = algorithm.after_anchor, algorithm.critic_weights
            self.critic_loss = algorithm.critic_loss

    def latent_request(self, *args: Any, **kwargs: Any) -> Any:
        return cast("LatentAlgorithm", self._algorithm).latent_request(*args, **kwargs)

    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        return self._algorithm.advantages(track)

    def anchor(self, track: Track, replay: Replay) -> Track:
        return self._algorithm.anchor(track, replay)

    def weights(self, track: Track) -> Mapping[str, Tensor]:
        return self._algorithm.weights(track)

    def loss(self, track: Track, replay: Replay, *, progress: float) -> Losses:
        return self._algorithm.loss(track, replay, progress=progress)


class AlreadyAnchored(SameAlgorithm):
    """An algorithm whose anchor pass has been, so that the stack can train with weights that moved since."""

    def __init__(self, algorithm: Algorithm) -> None:
        super().__init__(algorithm)
        self._values: dict[str, Tensor] = {}
        if isinstance(algorithm, CriticAlgorithm):
            self.after_anchor = self._with_values_of_then

    def anchor(self, track: Track, replay: Replay) -> Track:
        values = track.text.values if isinstance(track.segment, TextSegment) else None
        self._values.update(zip(track.sample_ids, values or (), strict=values is not None))
        return track

    def _with_values_of_then(
        self, track: Track, sum_over_ranks: Callable[[Tensor], Tensor]
    ) -> tuple[Track, Mapping[str, Metric]]:
        """The stack has asked the critic once more, after it moved."""
        values = tuple(self._values[name] for name in track.sample_ids)
        return dataclasses.replace(track, segment=dataclasses.replace(track.text, values=values)), {}


def apart(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Distance of two gradients as a share of the norm of the second; infinite when one has a number that is none.

    Of policy and critic it is the larger one.
    """
    assert one.keys() == other.keys()
    owners = [[name for name in one if name.startswith(CRITIC) is is_critic] for is_critic in (False, True)]
    return max(_apart(names, one, other) for names in owners if names)


def _apart(names: Sequence[str], one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    squares = sum(float((one[name] - other[name]).double().square().sum()) for name in names)
    norm = sum(float(other[name].double().square().sum()) for name in names)
    assert norm > 0, "the gradient is 0 all over, so there is nothing to compare"
    return (squares / norm) ** 0.5 if squares == squares else float("inf")


def of_policy(gradient: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The part of a gradient that is not a critic's."""
    return {name: value for name, value in gradient.items() if not name.startswith(CRITIC)}


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


def _size(
    start: Sequence[tuple[Tensor, Tensor]], ways: Sequence[Tensor], distance: float, numbers: Callable[[], Tensor]
) -> float:
    """How far to go along `ways` for half of the numbers to change by `distance`, to a tenth of it."""
    before, size = numbers(), 1e-3
    for _ in range(20):
        _put(start, [size * way for way in ways])
        found = float((numbers() - before).abs().median())
        if abs(found / distance - 1) < 0.1:
            return size
        # The change is linear at first and quadratic later; a root of the quotient overshoots in neither.
        size *= (distance / found) ** 0.5
    raise AssertionError(f"the workbench model could not be moved by {distance}; this is a defect of the kit")


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
