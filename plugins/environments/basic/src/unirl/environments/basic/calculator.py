"""A calculator that a model calls in its text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from unirl.core.roles import Observation
from unirl.core.specs.check import check_config

from .arithmetic import CannotCompute, value_of
from .config import CalculatorConfig

if TYPE_CHECKING:
    from unirl.core.types.inputs import Inputs

__all__ = ["Calculator", "build"]


def build(config: CalculatorConfig) -> Calculator:
    check_config(config, key="environment")
    return Calculator(config)


class Calculator:
    """Answers each call in an answer with its value, one a line; an answer without a call ends the episode.

    A call is an expression between the markers, or a JSON object `{"arguments": {"expression": ...}}`, as instruct
    models write calls of tools. Stateless: the seed decides nothing.
    """

    def __init__(self, config: CalculatorConfig) -> None:
        self._config = config
        # A stop string is not part of an answer: the last marker may be one.
        opens, closes = re.escape(config.opens), re.escape(config.closes)
        self._calls = re.compile(rf"{opens}(.*?)(?:{closes}|\Z)", re.DOTALL)

    def reset(
        self, inputs: Inputs, metadata: Sequence[Mapping[str, Any]], *, seeds: Sequence[int]
    ) -> Sequence[Observation]:
        return [Observation()] * inputs.num_rows

    def step(self, answers: Mapping[str, str]) -> Mapping[str, Observation]:
        return {sample: self._observation(answer) for sample, answer in answers.items()}

    def close(self) -> None:
        """Nothing is held."""

    def _observation(self, answer: str) -> Observation:
        calls = self._calls.findall(answer)
        if not calls:
            return Observation(done=True)
        lines: list[str] = []
        reward = self._config.call_reward
        for call in calls:
            try:
                lines.append(value_of(_expression(call)))
            except CannotCompute as error:
                lines.append(f"error: {error}")
                reward = self._config.error_reward
        return Observation(text="\n".join(lines), reward=reward)


def _expression(call: str) -> str:
    if not call.strip().startswith("{"):
        return call
    try:
        given = json.loads(call)
        expression = cast("object", given["arguments"]["expression"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CannotCompute('expected {"arguments": {"expression": "..."}}') from error
    return str(expression)
