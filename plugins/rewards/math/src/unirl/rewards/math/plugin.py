"""A reward of answers that can be checked."""

from __future__ import annotations

from collections.abc import Iterable

from unirl.core.capability import Cap, Support
from unirl.core.config import TextSamplingConfig
from unirl.core.hookspec import hookimpl
from unirl.core.plan import Plan
from unirl.core.spec import RewardExample, RewardSpec

__all__ = ["MATH", "unirl_check_plan", "unirl_rewards"]

MATH = RewardSpec(
    name="math",
    summary="Whether the answer that the text ends in is the prompt's answer, found and compared by a chosen method",
    build="unirl.rewards.math.reward:build",
    config="unirl.rewards.math.config:MathConfig",
    capabilities={
        Cap.REWARD_SAMPLE: Support.NATIVE,
        Cap.REWARD_GROUP: Support.NO,
        Cap.REWARD_DIFFERENTIABLE: Support.NO,
    },
    scale="1 for a right answer, else 0; a share `format_weight` of it is for the format; truncated=soft takes up to 1",
    range=(-1.0, 1.0),
    examples=(
        RewardExample(prompt="What is 6 x 7?", metadata={"answer": "42"}, text="42"),
        RewardExample(prompt="What is 2 - 900?", metadata={"answer": "-898"}, text="-898"),
        RewardExample(prompt="What is 600 x 2?", metadata={"answer": 1200}, text="1,200."),
    ),
    media="text",
    metadata=("answer",),
    parts=("correct", "unparsed", "failed", "format", "overlong"),
)


@hookimpl
def unirl_rewards() -> list[RewardSpec]:
    return [MATH]


@hookimpl
def unirl_check_plan(plan: Plan) -> Iterable[str]:
    """Settings that mean nothing, and a penalty for length that no text can meet."""
    from unirl.rewards.math.config import MathConfig, problems

    limits = [one.max_new_tokens for one in plan.sampling.values() if isinstance(one, TextSamplingConfig)]
    for key, choice in plan.rewards.items():
        if choice.spec is not MATH:
            continue
        config = choice.config
        assert isinstance(config, MathConfig)
        wrong = problems(config)
        yield from (f"reward.{key}.{problem}" for problem in wrong)
        if wrong or config.truncated != "soft" or not limits:
            continue
        assert config.max_tokens is not None
        first = config.max_tokens - config.overlong_buffer
        if first >= max(limits):
            yield (
                f"reward.{key}.max_tokens: the penalty of truncated=soft begins after {first} tokens, and no text has "
                f"more than sampling.max_new_tokens = {max(limits)}; set max_tokens=${{sampling.max_new_tokens}}."
            )
