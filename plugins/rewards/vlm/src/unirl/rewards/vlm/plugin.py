"""Rewards judged by vision-language models."""

from __future__ import annotations

from pathlib import Path

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap, Support
from unirl.core.specs.spec import RewardExample, RewardSpec
from unirl.core.types.data import MediaRef

__all__ = ["EDIT_REWARD", "HPSV3", "UNIFIED_REWARD", "UNIFIED_REWARD_PAIRWISE", "VLM_JUDGE", "WISE", "unirl_rewards"]

_EACH = {Cap.REWARD_SAMPLE: Support.NATIVE, Cap.REWARD_GROUP: Support.NO, Cap.REWARD_DIFFERENTIABLE: Support.NO}
_GROUPS = {**_EACH, Cap.REWARD_SAMPLE: Support.NO, Cap.REWARD_GROUP: Support.NATIVE}
_TRIAL = {"answer": "expected", "dtype": "float32"}
"""Random weights write no answer that can be parsed; their expected scores are defined like any others."""
_TINY = "unirl.rewards.vlm.tiny:write"
_EXAMPLES = (RewardExample(prompt="a red cube on a blue sphere"), RewardExample(prompt="two cats at a {table}"))

VLM_JUDGE = RewardSpec(
    name="vlm-judge",
    summary="A VLM's answer to a prompt template of your own, in process or from an OpenAI-compatible endpoint",
    build="unirl.rewards.vlm.judge:build",
    config="unirl.rewards.vlm.config:JudgeConfig",
    capabilities=_EACH,
    trial=_TRIAL,
    tiny=_TINY,
    scale="the template's range brought to 0 to 1; several scores by their weights",
    range=(0.0, 1.0),
    examples=_EXAMPLES,
    media="any",
    parts=("raw",),
)

UNIFIED_REWARD = RewardSpec(
    name="unified-reward",
    summary="UnifiedReward's pointwise score of an image or a video",
    build="unirl.rewards.vlm.judge:build",
    config="unirl.rewards.vlm.config:UnifiedRewardConfig",
    capabilities=_EACH,
    trial=_TRIAL,
    tiny=_TINY,
    scale="final score / 5, 0.2 to 1",
    range=(0.2, 1.0),
    examples=_EXAMPLES,
    media="any",
    parts=("raw",),
)

UNIFIED_REWARD_PAIRWISE = RewardSpec(
    name="unified-reward-pairwise",
    summary="Share of the other samples of its group that a VLM prefers a sample to",
    build="unirl.rewards.vlm.judge:build_pairwise",
    config="unirl.rewards.vlm.config:PairwiseConfig",
    capabilities=_GROUPS,
    trial=_TRIAL,
    tiny=_TINY,
    scale="mean preference over the other samples, 0 to 1; 0.5 where neither is better",
    range=(0.0, 1.0),
    examples=_EXAMPLES,
    media="any",
    parts=("compared",),
)

WISE = RewardSpec(
    name="wise",
    summary="WiScore of prompts that need knowledge of the world: consistency, realism, aesthetic quality",
    build="unirl.rewards.vlm.judge:build",
    config="unirl.rewards.vlm.config:WiseConfig",
    capabilities=_EACH,
    trial=_TRIAL,
    tiny=_TINY,
    scale="(0.7 consistency + 0.2 realism + 0.1 aesthetic) / 2, each 0 to 2; 0 to 1",
    range=(0.0, 1.0),
    examples=(
        RewardExample(
            prompt="the fruit that fell on Newton", metadata={"explanation": "an apple, beside the physicist or alone"}
        ),
        RewardExample(prompt="ice at 50 degrees Celsius", metadata={"explanation": "a puddle of water and no ice"}),
    ),
    media="image",
    metadata=("explanation",),
    metadata_kinds={"explanation": ("text",)},
    parts=("consistency", "realism", "aesthetic"),
)

EDIT_REWARD = RewardSpec(
    name="edit-reward",
    summary="Whether an edited image follows its instruction, and how sound it is, beside the source image",
    build="unirl.rewards.vlm.judge:build",
    config="unirl.rewards.vlm.config:EditRewardConfig",
    capabilities=_EACH,
    trial=_TRIAL,
    tiny=_TINY,
    scale="mean of following and quality, 1 to 4 each, brought to 0 to 1",
    range=(0.0, 1.0),
    examples=tuple(
        RewardExample(
            prompt=prompt,
            media=(MediaRef(modality="image", role="source", uri=str(Path(__file__).with_name("source.png"))),),
        )
        for prompt in ("make the disk green", "remove the disk")
    ),
    media="image",
    parts=("following", "quality"),
)

HPSV3 = RewardSpec(
    name="hpsv3",
    summary="HPSv3, human preference as a mean and a sigma, from a reward head on Qwen2-VL",
    build="unirl.rewards.vlm.hpsv3:build",
    config="unirl.rewards.vlm.config:Hpsv3Config",
    capabilities=_EACH,
    trial={"dtype": "float32"},
    tiny="unirl.rewards.vlm.tiny:write_hpsv3",
    scale="mu / 15, unbounded; good images are near 1",
    examples=_EXAMPLES,
    media="image",
    parts=("mu", "sigma"),
)


@hookimpl
def unirl_rewards() -> list[RewardSpec]:
    return [VLM_JUDGE, UNIFIED_REWARD, UNIFIED_REWARD_PAIRWISE, WISE, EDIT_REWARD, HPSV3]
