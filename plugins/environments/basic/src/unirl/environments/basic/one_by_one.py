"""An environment of episodes that are objects of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from unirl.core.roles import EpisodeFailed, Observation

if TYPE_CHECKING:
    from unirl.core.types.inputs import Inputs

__all__ = ["Episode", "OneByOne"]


class Episode(Protocol):
    """One conversation."""

    def start(self) -> Observation:
        """What the environment says first; its text may be empty."""
        ...

    def step(self, answer: str) -> Observation: ...

    def close(self) -> None:
        """Called once: at its end, or when it is not needed any more."""
        ...


class OneByOne:
    """Implements `unirl.core.roles.Environment` over one object an episode. An error of one names its sample."""

    def __init__(self, make: Callable[[str, Mapping[str, Any], int], Episode]) -> None:
        """make: of the prompt, its metadata and the seed."""
        self._make = make
        self._live: dict[str, Episode] = {}

    def reset(
        self, inputs: Inputs, metadata: Sequence[Mapping[str, Any]], *, seeds: Sequence[int]
    ) -> Sequence[Observation]:
        self.close()
        result: list[Observation] = []
        for name, prompt, facts, seed in zip(inputs.ids, inputs.prompts, metadata, seeds, strict=True):
            self._live[name] = episode = _named(name, lambda: self._make(prompt, facts, seed))  # noqa: B023 - called here
            result.append(_named(name, episode.start))
        return result

    def step(self, answers: Mapping[str, str]) -> Mapping[str, Observation]:
        result: dict[str, Observation] = {}
        for name, answer in answers.items():
            result[name] = _named(name, lambda: self._live[name].step(answer))  # noqa: B023 - called here
            if result[name].done:
                self._live.pop(name).close()
        return result

    def close(self) -> None:
        while self._live:
            self._live.popitem()[1].close()


def _named(sample: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        raise EpisodeFailed(sample) from error
