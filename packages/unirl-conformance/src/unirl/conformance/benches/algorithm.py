"""An algorithm on a denoiser of a few thousand weights: rollouts, replays and updates in milliseconds.

A claim asks for a `Trial`: a rollout that the algorithm itself requested, scored, with advantages, next to the model
that made it and frozen copies for the policies that the algorithm may ask for.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from unirl.core.capability import Needs
from unirl.core.config import AdvantageConfig, LatentSamplingConfig, PartConfig, SdeStepsConfig, TrainConfig
from unirl.core.data import Prompt
from unirl.core.requests import build_request
from unirl.core.roles import Algorithm, LatentAlgorithm, Losses, Policy, Replay, TrainReport
from unirl.core.spec import AlgorithmSpec
from unirl.core.track import Track
from unirl.numerics.reduction import LossTerm, reduce_terms, weight_totals
from unirl.numerics.stack import train_on
from unirl.numerics.track_replay import TrackReplay

from ..verdicts import NotApplicable
from ..workbench.model import WorkbenchModel
from ..workbench.requests import PROMPTS
from ..workbench.rollouts import sample_track
from ..workbench.updates import PlainUpdater
from .base import Bench

__all__ = ["CLIP", "ROUNDING", "AlgorithmBench", "AlreadyAnchored", "Trial", "apart", "scored"]

CLIP = 0.05
"""Clip range of trials. A clip decides differences of its own size; at this one they stand far above fp32 rounding."""
ROUNDING = 1e-5
"""Largest difference of two gradients that should be one, as a share of its norm. Sums of some hundred fp32 products
in another order differ by 1e-6 of their largest addend, and advantages that cancel leave a tenth of that."""
SAMPLES_PER_PROMPT = 4
REWARD_WEIGHTS: Mapping[str, float] = {"one": 0.75, "two": 0.25}
COEFFICIENT = 0.1
"""What a float key of `when` is set to: enough to show in a loss of order 1, too little to drown it."""
ON: Mapping[type, Any] = {bool: True, int: 1, float: COEFFICIENT}
"""How a key of `when` is switched on, by the type of its default; switched off it is the type's zero."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """An algorithm with a rollout to learn from."""

    algorithm: Algorithm
    config: PartConfig
    needs: Needs
    model: WorkbenchModel
    policies: _Policies
    track: Track
    """With rewards and advantages; the log-probs are the engine's. Groups of 4, 3 and 4."""

    def replay(self, *, stacked: bool = True) -> TrackReplay:
        return TrackReplay(self.model, stacked=stacked, policy_context=self.policies)

    def anchored(self, track: Track | None = None, replay: Replay | None = None) -> Track:
        """The track (or another one) with what the updates compare with, under the weights as they are now."""
        with torch.no_grad():
            return self.algorithm.anchor((track or self.track).to(self.model.device), replay or self.replay())

    def log_probs(self, track: Track | None = None) -> Tensor:
        """[n, S] under the weights as they are now; 0 where a row has no step."""
        with torch.no_grad():
            return self.replay()((track or self.track).to(self.model.device)).log_probs

    def move(self, distance: float = CLIP) -> None:
        """Move the live weights at random, until half of the log-probs have changed by more than `distance`.

        Where nothing is stochastic there are no log-probs, and the weights move by a twentieth of their size.
        """
        random = torch.Generator().manual_seed(5)
        start = [(param, param.detach().clone()) for param in self.model.net.parameters()]
        ways = [torch.randn(value.shape, generator=random).to(value.device) for _, value in start]
        if not self.track.latent.sde_steps.numel():
            _put(start, [0.05 * value.abs().mean() * way for (_, value), way in zip(start, ways, strict=True)])
            return
        before, valid = self.log_probs(), (self.track.latent.sde_steps >= 0).to(self.model.device)
        size = 1e-3
        for _ in range(20):
            _put(start, [size * way for way in ways])
            found = float((self.log_probs() - before)[valid].abs().median())
            if abs(found / distance - 1) < 0.1:
                return
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
            replay=replay or self.replay(),
            updates=1,
            micro_batch=micro_batch,
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


@dataclass(frozen=True, kw_only=True)
class AlgorithmBench(Bench):
    @property
    def spec(self) -> AlgorithmSpec:
        return cast(AlgorithmSpec, self.subject.found("algorithm").spec)

    def needs(self, on: Collection[str] = ()) -> Needs:
        """What the algorithm needs with these keys of `when` on. Raises NotApplicable for what no kit can try yet."""
        needs = self.spec.needs
        for key in on:
            needs = needs.merged(self.spec.when[key])
        for is_beyond, what in (
            (needs.track == "text", "trains text tracks, and the roles have none yet"),
            (needs.critic, "needs a critic, and no role trains one yet"),
            (needs.gradient != "surrogate", "has its gradient through the sampler, and no role gives that yet"),
        ):
            if is_beyond:
                raise NotApplicable(f"algorithm {self.spec.name!r} {what}")
        return needs

    def variants(self) -> list[tuple[str, ...]]:
        """Keys of `when` that are on, in turn: none, each alone, and all together."""
        keys = tuple(self.spec.when)
        return [(), *((key,) for key in keys), *([keys] if len(keys) > 1 else [])]

    def config(self, on: Collection[str] = (), **settings: Any) -> PartConfig:
        """Its defaults and its trial settings, `when` switched on where asked and off elsewhere, a clip of `CLIP`."""
        found = self.subject.found("algorithm")
        plain = self.workshop.config(found)
        switched = {key: _switched(plain, key, is_on=key in on) for key in self.spec.when}
        clip = {self.spec.clip_key: CLIP} if self.spec.clip_key else {}
        return self.workshop.config(found, {**clip, **switched, **settings})

    def algorithm(
        self,
        config: PartConfig | None = None,
        *,
        advantage: AdvantageConfig | None = None,
        reward_weights: Mapping[str, float] = REWARD_WEIGHTS,
        train: TrainConfig | None = None,
    ) -> Algorithm:
        self.needs()
        return self.workshop.build(
            self.subject.found("algorithm"),
            config or self.config(),
            advantage=advantage or AdvantageConfig(),
            reward_weights=reward_weights,
            train=train or TrainConfig(),
        )

    def sampling(self, needs: Needs, **settings: Any) -> LatentSamplingConfig:
        """Five steps, the first three of them stochastic where the algorithm needs noise, on 24 x 16 pixels."""
        noisy = needs.stochastic or needs.log_probs == "gaussian"
        chosen: dict[str, Any] = {"steps": 5, "height": 24, "width": 16}
        if noisy:
            chosen |= {"kernel": "flow-sde", "sde": SdeStepsConfig(mode="fraction", last=0.6)}
        else:
            chosen |= {"kernel": "euler", "eta": 0.0, "sde": SdeStepsConfig(mode="none")}
        return LatentSamplingConfig(**{**chosen, **settings})

    def trial(
        self,
        on: Collection[str] = (),
        *,
        is_ragged: bool = False,
        is_strict: bool = False,
        trajectory: str = "",
        train: TrainConfig | None = None,
        **settings: Any,
    ) -> Trial:
        """A rollout of 11 samples in groups of 4, 3 and 4, all with rewards of their own.

        on: keys of `when`.  is_ragged: the second group has one SDE step less than the others.  is_strict: only the
        policies that the spec names can be used.  trajectory: which latents are stored, instead of those that the
        algorithm asks for.  settings: of its config.
        """
        needs, config = self.needs(on), self.config(on, **settings)
        algorithm = self.algorithm(config, train=train)
        model = WorkbenchModel(device=self.device)
        request = build_request(
            [Prompt(prompt_id=f"p{n}", text=text, metadata={"number": n}) for n, text in enumerate(PROMPTS)],
            samples_per_prompt=SAMPLES_PER_PROMPT,
            sampling={"image": self.sampling(needs)},
            model=model,
            algorithm=algorithm,
            seed=3,
            rollout=2,
            policy_version=0,
        )
        wanted = request.latent("image")
        steps = wanted.sde_steps.clone()
        if is_ragged and steps.shape[1] > 1:
            steps[SAMPLES_PER_PROMPT : 2 * SAMPLES_PER_PROMPT, -1] = -1
        wanted = dataclasses.replace(wanted, sde_steps=steps, trajectory=trajectory or wanted.trajectory)
        track = sample_track(model, dataclasses.replace(request, tracks={"image": wanted}), "image")
        track = track.select([row for row in range(track.num_rows) if row != 2 * SAMPLES_PER_PROMPT - 1])
        track, _ = algorithm.advantages(scored(track, _rewards(track.num_rows)))
        return Trial(
            algorithm=algorithm,
            config=config,
            needs=needs,
            model=model,
            policies=_Policies(model, _named(needs) if is_strict else ("reference", "ema", "lagged")),
            track=track,
        )

    def advantages(
        self,
        rewards: Mapping[str, Sequence[float]],
        groups: str,
        *,
        advantage: AdvantageConfig | None = None,
        weights: Sequence[float] | None = None,
    ) -> Tensor:
        """[n] on the CPU: what the algorithm makes of these rewards. groups: a letter for each of up to 11 samples."""
        shared = self.workshop.shared(f"trial of {self.subject.kind} {self.subject.id}", self.trial)
        track = shared.track.select(range(len(groups)))
        track = dataclasses.replace(
            track,
            group_ids=tuple(groups),
            advantages=None,
            weights=torch.ones(len(groups)) if weights is None else torch.tensor(weights),
        )
        weighted = {name: REWARD_WEIGHTS[name] for name in rewards}
        algorithm = self.algorithm(shared.config, advantage=advantage, reward_weights=weighted)
        found, metrics = algorithm.advantages(scored(track, rewards))
        assert found.advantages is not None, "advantages() returned a track without advantages"
        wrong = {name: number for name, number in metrics.items() if number != number or abs(number) == float("inf")}
        assert not wrong, f"advantages() gave numbers for the log that are none: {wrong}"
        return found.advantages.detach().cpu()


def scored(track: Track, rewards: Mapping[str, Sequence[float]]) -> Track:
    """The track with these rewards by name and their weighted sum, as the loop leaves them."""
    parts = {name: torch.tensor(list(values), dtype=torch.float32) for name, values in rewards.items()}
    total = torch.stack([REWARD_WEIGHTS[name] * values for name, values in parts.items()]).sum(0)
    return dataclasses.replace(track, rewards=total, reward_parts=parts)


def apart(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Distance of two gradients as a share of the norm of the second; infinite when one has a number that is none."""
    assert one.keys() == other.keys()
    squares = sum(float((one[name] - other[name]).double().square().sum()) for name in one)
    norm = sum(float(other[name].double().square().sum()) for name in other)
    assert norm > 0, "the gradient is 0 all over, so there is nothing to compare"
    return (squares / norm) ** 0.5 if squares == squares else float("inf")


def _rewards(count: int) -> dict[str, list[float]]:
    """Irregular and all different; multiples of 1/64, so that fp32 holds them and their sums exactly."""
    return {
        "one": [(37 * row * row + 11 * row) % 64 / 64 for row in range(count)],
        "two": [(23 * row * row + 5 * row + 7) % 64 / 64 for row in range(count)],
    }


def _named(needs: Needs) -> tuple[Policy, ...]:
    reference: tuple[Policy, ...] = ("reference",) if needs.reference == "policy" else ()
    return (*reference, *(("lagged",) if needs.old_policy != "none" else ()))


def _switched(config: PartConfig, key: str, *, is_on: bool) -> Any:
    kind = type(getattr(config, key))
    assert kind in ON, f"when: key {key!r} is a {kind.__name__}; the kit can switch bool, int and float keys"
    return ON[kind] if is_on else kind()


def _put(start: Sequence[tuple[Tensor, Tensor]], shifts: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for (param, value), shift in zip(start, shifts, strict=True):
            param.copy_(value + shift)


def _cpu(totals: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: total.cpu() for name, total in totals.items()}


class _Policies:
    """Frozen copies of the model under the names of policies, each a little elsewhere. Fits `Backend.policy`."""

    def __init__(self, model: WorkbenchModel, allowed: Collection[Policy]) -> None:
        self._model = model
        self._copies: dict[str, torch.nn.Module] = {}
        for seed, which in enumerate(("reference", "ema", "lagged")):
            frozen = copy.deepcopy(model.net).requires_grad_(False)
            random = torch.Generator().manual_seed(seed)
            for value in frozen.parameters():
                value.add_(0.03 * torch.randn(value.shape, generator=random).to(value.device))
            self._copies[which] = frozen
        self._allowed = allowed

    @contextmanager
    def __call__(self, which: Policy = "live") -> Generator[None]:
        if which == "live":
            yield
            return
        assert which in self._allowed, f"the loss asks for the policy {which!r}, which the spec's needs do not name"
        # Swapped, not loaded over the live weights: those belong to a graph that backward still has to walk.
        live, self._model.net = self._model.net, cast(Any, self._copies[which])
        try:
            yield
        finally:
            self._model.net = live
