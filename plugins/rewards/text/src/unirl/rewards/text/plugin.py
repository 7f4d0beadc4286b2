"""Rewards of text: its format, its length, and what a reward model says of it."""

from __future__ import annotations

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import RewardExample, RewardSpec

__all__ = ["FORMAT", "LENGTH", "REWARD_MODEL", "unirl_rewards"]

_PER_SAMPLE = {Cap.REWARD_SAMPLE}

FORMAT = RewardSpec(
    name="format",
    summary="Whether a completion consists of tags in order, or matches a pattern",
    build="unirl.rewards.text.format:build",
    config="unirl.rewards.text.config:FormatConfig",
    capabilities=_PER_SAMPLE,
    scale="1 for the right format, else 0; with score=share the share of tags that are right",
    range=(0.0, 1.0),
    examples=(
        RewardExample(prompt="What is 6 x 7?", text="<think>6 x 7 = 42</think>\n<answer>42</answer>"),
        RewardExample(prompt="What is 6 + 7?", text="<think>That is 13.</think><answer>13</answer>"),
    ),
    media="text",
    parts=("strict", "tags"),
)

LENGTH = RewardSpec(
    name="length",
    summary="Length within a target range, falling linearly outside; DAPO's soft overlong penalty",
    build="unirl.rewards.text.length:build",
    config="unirl.rewards.text.config:LengthConfig",
    capabilities=_PER_SAMPLE,
    trial={"unit": "words", "least": 3, "most": 5, "falloff": 4},
    scale="1 within the range, linearly down to 0 at `falloff` outside; one less with penalty=true",
    range=(-1.0, 1.0),
    examples=(
        RewardExample(prompt="Say something.", text="one two three four"),
        RewardExample(prompt="Say more.", text="one two three four five six seven eight"),
    ),
    media="text",
    parts=("length", "over", "under"),
)

REWARD_MODEL = RewardSpec(
    name="reward-model",
    summary="Score of a reward model: any sequence classifier of transformers, over the conversation",
    build="unirl.rewards.text.reward_model:build",
    config="unirl.rewards.text.config:RewardModelConfig",
    capabilities=_PER_SAMPLE,
    tiny="unirl.rewards.text.tiny:write",
    scale="the logit of the model's one output, or of `label`; unbounded, on the scale of its checkpoint",
    examples=(
        RewardExample(prompt="What is 6 x 7?", text="6 x 7 = 42"),
        RewardExample(prompt="Why?", text="Because it is the sum of six sevens, and those are 42."),
    ),
    media="text",
    parts=("truncated",),
)


@hookimpl
def unirl_rewards() -> list[RewardSpec]:
    return [FORMAT, LENGTH, REWARD_MODEL]
