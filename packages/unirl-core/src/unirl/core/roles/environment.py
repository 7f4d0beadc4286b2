"""Environments: they answer a model's texts, turn by turn, and reward them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ..types.inputs import Inputs

__all__ = ["RETURN", "Environment", "EpisodeFailed", "Observation"]

RETURN = "environment"
"""Name of the return of episodes among the rewards of a track, and of an environment among its turns."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The environment's reply to an answer, or the start of an episode."""

    text: str = ""
    """Next turn of the conversation. May be empty at the start, where it follows the prompt in one message, and when
    `done`, where nothing reads it."""
    reward: float = 0.0
    """Reward of the answer, finite; 0 at the start."""
    done: bool = False
    """Whether the episode ends with this; never at the start."""


class EpisodeFailed(Exception):
    """Raised from the error of one episode by an environment that knows which: `raise EpisodeFailed(name) from error`.
    Other errors count as those of all episodes of the call."""

    def __init__(self, sample: str) -> None:
        super().__init__(sample)
        self.sample = sample


class Environment(Protocol):
    """Runs many episodes at once. Build: `build(config) -> Environment`, in the process of the loop.

    One thread calls it. Episodes do not depend on each other: any split of them gives the same.
    """

    def reset(
        self, inputs: Inputs, metadata: Sequence[Mapping[str, Any]], *, seeds: Sequence[int]
    ) -> Sequence[Observation]:
        """Start an episode for each row, in place of those before: all that is random in it comes from its seed.

        inputs: their ids name the episodes in `step`.  metadata: of the prompts.  seeds: 63 bits each.
        Returns the first observations, in the order of the rows.
        """
        ...

    def step(self, answers: Mapping[str, str]) -> Mapping[str, Observation]:
        """Returns the observation after each of these answers: one per id, and no others.

        answers: id of an episode that is not over -> the model's text, without special tokens.
        """
        ...

    def close(self) -> None:
        """Stop all that was started. May be called twice."""
        ...
