"""Environments for text models."""

from __future__ import annotations

from pathlib import Path

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.spec import EnvironmentExample, EnvironmentSpec

__all__ = ["CALCULATOR", "FUNCTION", "GRID", "GYMNASIUM", "unirl_environments"]

CALCULATOR = EnvironmentSpec(
    name="calculator",
    summary="A calculator: it answers expressions between <calc> and </calc> with their values",
    build="unirl.environments.basic.calculator:build",
    config="unirl.environments.basic.config:CalculatorConfig",
    examples=(
        EnvironmentExample(prompt="What is 12 x 34?", answers=("<calc>12*34</calc>", "408")),
        EnvironmentExample(prompt="What is 7 / 0?", answers=("<calc>7/0</calc>", "It has no value.")),
    ),
)

GRID = EnvironmentSpec(
    name="grid",
    summary="A game in text: walk to the goal of a small grid, around its holes",
    build="unirl.environments.basic.grid:build",
    config="unirl.environments.basic.config:GridConfig",
    examples=(EnvironmentExample(prompt="Walk to G.", answers=("Where am I?", "stop")),),
)

GYMNASIUM = EnvironmentSpec(
    name="gymnasium",
    summary="Any text environment of gymnasium, by its id",
    build="unirl.environments.basic.gym:build",
    config="unirl.environments.basic.config:GymnasiumConfig",
    trial={"id": "Blackjack-v1", "actions": ["stick", "hit"]},
    examples=(EnvironmentExample(prompt="Play a hand of blackjack.", answers=("I wait.", "stick")),),
)

FUNCTION = EnvironmentSpec(
    name="function",
    summary="A Python function of yours, which gets each answer and returns what follows it",
    build="unirl.environments.basic.function:build",
    config="unirl.environments.basic.config:FunctionConfig",
    trial={"target": str(Path(__file__).with_name("example.py")) + ":guess"},
    examples=(EnvironmentExample(prompt="Guess my number.", metadata={"number": 7}, answers=("4", "9", "7")),),
)


@hookimpl
def unirl_environments() -> list[EnvironmentSpec]:
    return [CALCULATOR, GRID, GYMNASIUM, FUNCTION]
