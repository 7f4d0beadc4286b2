"""A reward for verifiable answers."""

from __future__ import annotations

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import RewardExample, RewardSpec

__all__ = ["MATH", "unirl_rewards"]

MATH = RewardSpec(
    name="math",
    summary="Whether the completion's final answer is the prompt's answer, extracted and compared by `method`",
    build="unirl.rewards.math.reward:build",
    config="unirl.rewards.math.config:MathConfig",
    capabilities={Cap.REWARD_SAMPLE},
    scale="1 for a right answer, else 0; a share `format_weight` of it is for the format; truncated=soft takes up to 1",
    range=(-1.0, 1.0),
    examples=(
        RewardExample(prompt="What is 6 x 7?", metadata={"answer": "42"}, text="42"),
        RewardExample(prompt="What is 2 - 900?", metadata={"answer": "-898"}, text="-898"),
        RewardExample(prompt="What is 600 x 2?", metadata={"answer": 1200}, text="1,200."),
    ),
    media="text",
    metadata=("answer",),
    metadata_kinds={"answer": ("text", "a number")},
    parts=("correct", "unparsed", "failed", "format", "overlong"),
)


@hookimpl
def unirl_rewards() -> list[RewardSpec]:
    return [MATH]
