"""DDPO: Flow-GRPO's loss, with advantages from running statistics of each prompt."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from unirl.algorithms.flow_grpo.algorithm import FlowGrpo
from unirl.algorithms.flow_grpo.config import DdpoConfig
from unirl.core.specs.check import check_config
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.batch import rows_by_group
from unirl.core.types.track import Track
from unirl.numerics.train.track_advantages import (
    chosen_and_clipped,
    counted_rewards,
    track_advantages,
    whole_groups,
)

__all__ = ["Ddpo", "build"]

Rewards = Mapping[str, Sequence[float]]
"""Name of a reward -> its scores, oldest first; equally many of each."""


def build(
    config: DdpoConfig,
    *,
    advantage: AdvantageConfig,
    reward_weights: Mapping[str, float],
    train: TrainConfig,
    seed: int,
) -> Ddpo:
    check_config(config, key="algorithm")
    return Ddpo(config, advantage=advantage, reward_weights=reward_weights, train=train)


class Ddpo(FlowGrpo):
    """DDPO-IS with PPO's clip, arXiv 2305.13301, section 4.3, over any kernel that has a density.

    A reward is normalised by mean and standard deviation of its prompt: over this step's samples and the latest of
    earlier steps, which take part as further members of the group, so every setting of `advantage` means what it means
    elsewhere. A prompt with fewer than `min_count` of both takes those of the whole rollout, as in the authors' code.
    The state is the rewards of earlier steps, by id of the prompt.
    """

    def __init__(
        self,
        config: DdpoConfig,
        *,
        advantage: AdvantageConfig,
        reward_weights: Mapping[str, float],
        train: TrainConfig,
    ) -> None:
        super().__init__(config, advantage=advantage, reward_weights=reward_weights, train=train)
        self._ddpo = config
        self._earlier: dict[str, Rewards] = {}
        self._now: dict[str, Rewards] = {}

    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        track = self.with_kl_weights(track, reward_weights=self._reward_weights)
        parts, _ = counted_rewards(track, self._reward_weights)
        counted = [weight > 0 for weight in track.sample_weights.tolist()]
        earlier: dict[str, Rewards] = {}
        few: set[str] = set()
        for group, rows in rows_by_group(track.group_ids).items():
            number = sum(counted[row] for row in rows)
            kept = _latest(self._earlier.get(track.inputs.ids[rows[0]], {}), self._ddpo.buffer_size - number)
            length = len(next(iter(kept.values()), ()))
            earlier |= {group: kept} if length else {}
            few |= {group} if number + length < self._ddpo.min_count else set()
        # Kept apart until the step ends: the state must not change before.
        self._now = {}
        for prompt, rows in rows_by_group(track.inputs.ids).items():
            if own := [row for row in rows if counted[row]]:
                self._now[prompt] = {name: cast("list[float]", part[own].tolist()) for name, part in parts.items()}
        every, weights = whole_groups(self._advantage), self._reward_weights
        result, numbers = track_advantages(track, every, reward_weights=weights, earlier=earlier)
        numbers["groups_below_min_count"] = float(len(few))
        if few:
            rollout = dataclasses.replace(every, scope="global", center="global")
            other, _ = track_advantages(track, rollout, reward_weights=weights)
            is_few = torch.tensor([group in few for group in track.group_ids], device=track.sample_weights.device)
            assert other.advantages is not None and result.advantages is not None
            values = torch.where(is_few, other.advantages, result.advantages)
            result = dataclasses.replace(result, advantages=values)
        result, chosen = chosen_and_clipped(result, self._advantage)
        return result, numbers | chosen

    def end_step(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Also add this step's rewards to those of their prompts."""
        joined: dict[str, Rewards] = {}
        for prompt, rewards in self._now.items():
            earlier = self._earlier.get(prompt, {})
            every = {name: [*earlier.get(name, ()), *scores] for name, scores in rewards.items()}
            joined[prompt] = _latest(every, self._ddpo.buffer_size)
        self._earlier, self._now = {**self._earlier, **joined}, {}
        return {**super().end_step(metrics), "prompts_with_statistics": float(len(self._earlier))}

    def state(self) -> dict[str, Any]:
        return {**super().state(), "rewards": self._earlier}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError unless `rewards` has equally many finite scores of each reward for each prompt, and the
        rest is the state of the KL coefficient."""
        rest = dict(state)
        rewards = rest.pop("rewards", None)
        if not isinstance(rewards, dict):
            raise ValueError(f"'rewards': got {rewards!r}, expected a mapping from ids of prompts to their scores.")
        checked = {
            prompt: _checked(prompt, scores, names=set(self._reward_weights)) for prompt, scores in rewards.items()
        }
        if set(rest) != set(super().state()):
            raise ValueError(f"got {sorted(state)}, expected {sorted(self.state())}.")
        if rest:
            super().load_state(rest)
        self._earlier, self._now = checked, {}


def _latest(rewards: Rewards, number: int) -> dict[str, list[float]]:
    """The newest `number` scores of each reward."""
    return {name: list(scores[max(0, len(scores) - number) :]) for name, scores in rewards.items()}


def _checked(prompt: str, scores: Any, *, names: set[str]) -> Rewards:
    lists = list(scores.values()) if isinstance(scores, dict) else []
    fits = bool(lists) and set(scores) == names and all(isinstance(values, list) for values in lists)
    fits = fits and len({len(values) for values in lists}) == 1
    if not fits or not all(_is_score(value) for values in lists for value in values):
        raise ValueError(
            f"'rewards' of prompt {prompt!r}: got {scores!r}, expected a list of finite scores of each of "
            f"{sorted(names)}, equally long."
        )
    return scores


def _is_score(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)
