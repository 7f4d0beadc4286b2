"""Any text environment of gymnasium, such as those of games and tasks that register there."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any

from unirl.core.errors import RecipeError
from unirl.core.roles import Observation
from unirl.core.specs.check import check_config

from .config import GymnasiumConfig
from .one_by_one import OneByOne

__all__ = ["GymEpisode", "build"]


def build(config: GymnasiumConfig) -> OneByOne:
    """Raises ModuleNotFoundError, with the extra to install, without gymnasium, and RecipeError for an environment that
    it does not know, or whose actions are neither texts nor named."""
    check_config(config, key="environment")
    try:
        gymnasium: Any = importlib.import_module("gymnasium")
    except ModuleNotFoundError as error:
        error.add_note(
            "The environment `gymnasium` needs one more package: pip install 'unirl-environment-basic[gymnasium]'"
        )
        raise
    if config.module:
        importlib.import_module(config.module)

    def make(prompt: str, metadata: Mapping[str, Any], seed: int) -> GymEpisode:
        return GymEpisode(gymnasium.make(config.id, **config.arguments), actions=config.actions, seed=seed)

    try:
        example = gymnasium.make(config.id, **config.arguments)
    except gymnasium.error.Error as error:
        raise RecipeError(f"environment.id: got {config.id!r}: {error}") from error
    try:
        _check(example.action_space, gymnasium, actions=config.actions)
    finally:
        example.close()
    return OneByOne(make)


class GymEpisode:
    """One episode. A text action is the answer itself; of named ones it is the last that the answer has in it, and
    without one the environment is asked again. Observations are their `str`."""

    def __init__(self, environment: Any, *, actions: list[str], seed: int) -> None:
        self._environment, self._actions, self._seed = environment, actions, seed
        # The long ones first: a name may begin with another one.
        ordered = sorted(actions, key=len, reverse=True)
        self._words = re.compile("|".join(map(re.escape, ordered))) if actions else None

    def start(self) -> Observation:
        # gymnasium takes seeds of 32 bits.
        observation, _ = self._environment.reset(seed=self._seed % 2**32)
        return Observation(text=str(observation))

    def step(self, answer: str) -> Observation:
        action: Any = answer
        if self._words is not None:
            found = self._words.findall(answer)
            if not found:
                return Observation(text=f"Say {', '.join(self._actions)}.")
            action = int(self._environment.action_space.start) + self._actions.index(found[-1])
        observation, reward, terminated, truncated, _ = self._environment.step(action)
        return Observation(text=str(observation), reward=float(reward), done=bool(terminated or truncated))

    def close(self) -> None:
        self._environment.close()


def _check(space: Any, gymnasium: Any, *, actions: list[str]) -> None:
    spaces = gymnasium.spaces
    if isinstance(space, spaces.Text):
        if actions:
            raise RecipeError(f"environment.actions: got {actions}, but its actions are texts; leave them out.")
    elif not isinstance(space, spaces.Discrete):
        raise RecipeError(f"environment.id: got actions {space}, expected texts, or numbered ones to be named.")
    elif len(actions) != int(space.n):
        raise RecipeError(
            f"environment.actions: got {len(actions)} names, expected {int(space.n)}, one for each action in its order."
        )
