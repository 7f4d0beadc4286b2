"""A reward for programs."""

from __future__ import annotations

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import RewardExample, RewardSpec

__all__ = ["UNIT_TESTS", "unirl_rewards"]

UNIT_TESTS = RewardSpec(
    name="unit-tests",
    summary="Tests that the completion's code passes, run in a sandbox",
    build="unirl.rewards.code.reward:build",
    config="unirl.rewards.code.config:UnitTestsConfig",
    capabilities={Cap.REWARD_SAMPLE},
    scale="share of the prompt's tests that pass, 0 to 1; with score=all 1 if every test passes, else 0",
    range=(0.0, 1.0),
    examples=(
        RewardExample(
            prompt="Write add(a, b).",
            metadata={"tests": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]},
            text="```python\ndef add(a, b):\n    return a + b\n```",
        ),
        RewardExample(
            prompt="Print the double of a number.",
            metadata={"tests": {"inputs": ["2", "5"], "outputs": ["4", "10"]}},
            text="```python\nprint(2 * int(input()))\n```",
        ),
    ),
    media="text",
    metadata=("tests",),
    metadata_kinds={"tests": ("text", "a list", "an object")},
    # Its examples are harmless, and not every machine lets a process make namespaces.
    trial={"isolation": "none", "network": "unisolated"},
    parts=("passed", "timeouts", "errors", "no-code", "broken"),
)


@hookimpl
def unirl_rewards() -> list[RewardSpec]:
    return [UNIT_TESTS]
