"""An algorithm on a model of a few thousand weights: rollouts, replays and updates in milliseconds.

A claim asks for a `Trial`: a rollout of the kind that the algorithm trains on, as it requested it, scored, with
advantages, next to the model that made it and frozen copies for the policies that the algorithm may ask for.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor
from unirl.core.capability import Needs
from unirl.core.config import (
    AdvantageConfig,
    LatentSamplingConfig,
    PartConfig,
    SdeStepsConfig,
    TextSamplingConfig,
    TrainConfig,
)
from unirl.core.request import Request
from unirl.core.requests import build_request
from unirl.core.roles import Algorithm, Policy
from unirl.core.spec import AlgorithmSpec, ModelSpec
from unirl.core.track import Track

from ..verdicts import NotApplicable
from ..workbench import model as latent_workbench
from ..workbench import text_model as text_workbench
from ..workbench.critic import PlainCritic
from ..workbench.model import WorkbenchModel
from ..workbench.requests import PROMPTS, numbered
from ..workbench.rollouts import sample_text, sample_track
from ..workbench.text_model import TextWorkbenchModel
from ..workbench.track_numbers import with_mask
from .base import Bench
from .trial import CLIP, POLICIES, FrozenPolicies, Trial, TrialModel, digest

__all__ = ["REWARD_WEIGHTS", "ROUNDING", "TEXT_TOKENS", "AlgorithmBench", "scored"]

ROUNDING = 1e-5
"""Largest difference of two gradients that should be one, as a share of its norm. Sums of some hundred fp32 products
in another order differ by 1e-6 of their largest addend, and advantages that cancel leave a tenth of that."""
SAMPLES_PER_PROMPT = 4
REWARD_WEIGHTS: Mapping[str, float] = {"one": 0.75, "two": 0.25}
TEXT_TOKENS = 16
"""Longest text of trials, and of whole rounds with a miniature."""
COEFFICIENT = 0.1
"""What a float key of `when` is set to: enough to show in a loss of order 1, too little to drown it."""
ON: Mapping[type, Any] = {bool: True, int: 1, float: COEFFICIENT}
"""How a key of `when` is switched on, by the type of its default; switched off it is the type's zero."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmBench(Bench):
    @property
    def spec(self) -> AlgorithmSpec:
        return cast(AlgorithmSpec, self.subject.found("algorithm").spec)

    @property
    def kind(self) -> Literal["latent", "text"]:
        """Of the tracks that it is tried on: text where it trains nothing else."""
        return "text" if self.spec.needs.track == "text" else "latent"

    @property
    def model_spec(self) -> ModelSpec:
        """Of the model that it is tried with."""
        return text_workbench.SPEC if self.kind == "text" else latent_workbench.SPEC

    @property
    def track(self) -> str:
        """Name of the track that it is tried on."""
        return next(iter(self.model_spec.tracks))

    def needs(self, on: Collection[str] = ()) -> Needs:
        """What the algorithm needs with these keys of `when` on. Raises NotApplicable for what no kit can try yet."""
        needs = self.spec.needs
        for key in on:
            needs = needs.merged(self.spec.when[key])
        if needs.gradient != "surrogate":
            raise NotApplicable(
                f"algorithm {self.spec.name!r} has its gradient through the sampler, and no role gives that yet"
            )
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

    def text_sampling(self, **settings: Any) -> TextSamplingConfig:
        """Plain prompts, and texts of up to 16 tokens, of which some end before."""
        return TextSamplingConfig(**{"max_new_tokens": TEXT_TOKENS, "temperature": 0.8, "chat": False, **settings})

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

        on: keys of `when`.  is_ragged: the second group has one SDE step less than the others; of text, some tokens are
        not trained on, among them all of a sample.  is_strict: only the policies that the spec names can be used.
        trajectory: which latents are stored, instead of those that the algorithm asks for.  settings: of its config.
        """
        needs, config = self.needs(on), self.config(on, **settings)
        algorithm = self.algorithm(config, train=train)
        if self.kind == "text":
            text = TextWorkbenchModel(device=self.device)
            model: TrialModel = text
            critic = PlainCritic(text) if needs.critic else None
            track = self._texts(text, algorithm)
        else:
            model, critic = WorkbenchModel(device=self.device), None
            track = self._latents(model, algorithm, needs, is_ragged=is_ragged, trajectory=trajectory)
        track = track.select([row for row in range(track.num_rows) if row != 2 * SAMPLES_PER_PROMPT - 1])
        if is_ragged and self.kind == "text":
            track = with_mask(track, _masks(track))
        track, _ = algorithm.advantages(scored(track, _rewards(track.num_rows)))
        return Trial(
            algorithm=algorithm,
            config=config,
            needs=needs,
            model=model,
            policies=FrozenPolicies(model, _named(needs) if is_strict else POLICIES),
            track=track,
            critic=critic,
            sizes=self.workshop.shared("sizes of moves", dict[str, float]),
        )

    def _texts(self, model: TextWorkbenchModel, algorithm: Algorithm) -> Track:
        request = build_request(
            numbered(PROMPTS),
            samples_per_prompt=SAMPLES_PER_PROMPT,
            sampling={self.track: self.text_sampling()},
            model=model,
            algorithm=algorithm,
            seed=3,
            rollout=2,
            policy_version=0,
        )
        return self._sampled(sample_text, model, request)

    def _latents(
        self, model: WorkbenchModel, algorithm: Algorithm, needs: Needs, *, is_ragged: bool, trajectory: str
    ) -> Track:
        request = build_request(
            numbered(PROMPTS),
            samples_per_prompt=SAMPLES_PER_PROMPT,
            sampling={self.track: self.sampling(needs)},
            model=model,
            algorithm=algorithm,
            seed=3,
            rollout=2,
            policy_version=0,
        )
        wanted = request.latent(self.track)
        steps = wanted.sde_steps.clone()
        if is_ragged and steps.shape[1] > 1:
            steps[SAMPLES_PER_PROMPT : 2 * SAMPLES_PER_PROMPT, -1] = -1
        wanted = dataclasses.replace(wanted, sde_steps=steps, trajectory=trajectory or wanted.trajectory)
        return self._sampled(sample_track, model, dataclasses.replace(request, tracks={self.track: wanted}))

    def _sampled(self, sample: Callable[..., Track], model: TrialModel, request: Request) -> Track:
        """A rollout of the model as it was made, sampled once for all that request the same; a copy."""
        key = f"rollout of {self.kind} on {self.device}, {digest(request)}"
        return copy.deepcopy(self.workshop.shared(key, lambda: sample(model, request, self.track)))

    def advantages(
        self,
        rewards: Mapping[str, Sequence[float]],
        groups: str,
        *,
        advantage: AdvantageConfig | None = None,
        weights: Sequence[float] | None = None,
        rows: Sequence[int] | None = None,
    ) -> Tensor:
        """[n] on the CPU: what the algorithm makes of these rewards, of tokens their mean in each text.

        groups: a letter for each of up to 11 samples.  rows: which of the trial they are, for what a critic says; the
        first ones if None.
        """
        shared = self.workshop.shared(f"trial of {self.subject.kind} {self.subject.id}", self.trial)
        track = shared.track.select(range(len(groups)) if rows is None else rows)
        track = dataclasses.replace(
            track,
            group_ids=tuple(groups),
            advantages=None,
            weights=torch.ones(len(groups)) if weights is None else torch.tensor(weights),
        )
        weighted = {name: REWARD_WEIGHTS[name] for name in rewards}
        algorithm = self.algorithm(shared.config, advantage=advantage, reward_weights=weighted)
        found, metrics = algorithm.advantages(scored(track, rewards))
        if shared.critic is not None:
            judged = dataclasses.replace(shared, algorithm=algorithm).anchored(found)
            assert judged.text.advantages is not None, "after_anchor() returned a track without advantages of tokens"
            found = dataclasses.replace(found, advantages=torch.stack([row.mean() for row in judged.text.advantages]))
        assert found.advantages is not None, "advantages() returned a track without advantages"
        wrong = {name: number for name, number in metrics.items() if number != number or abs(number) == float("inf")}
        assert not wrong, f"advantages() gave numbers for the log that are none: {wrong}"
        return found.advantages.detach().cpu()


def scored(track: Track, rewards: Mapping[str, Sequence[float]]) -> Track:
    """The track with these rewards by name and their weighted sum, as the loop leaves them."""
    parts = {name: torch.tensor(list(values), dtype=torch.float32) for name, values in rewards.items()}
    total = torch.stack([REWARD_WEIGHTS[name] * values for name, values in parts.items()]).sum(0)
    return dataclasses.replace(track, rewards=total, reward_parts=parts)


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


def _masks(track: Track) -> list[Tensor]:
    """Which tokens are trained on: of the second group all but every third, of the last row none, of others all."""
    rows = range(SAMPLES_PER_PROMPT, 2 * SAMPLES_PER_PROMPT - 1)
    masks = [torch.ones(length, dtype=torch.bool) for length in track.text.lengths]
    for row in rows:
        masks[row][1::3] = False
    masks[-1][:] = False
    return masks
