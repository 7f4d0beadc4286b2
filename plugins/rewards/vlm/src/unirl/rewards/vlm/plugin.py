"""Rewards judged by vision-language models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import RewardExample, RewardSpec
from unirl.core.types.data import MediaRef

__all__ = [
    "EDIT_JUDGE",
    "EDIT_REWARD",
    "GENEVAL2",
    "HPSV3",
    "PAIR_JUDGE",
    "UNIFIED_REWARD",
    "UNIFIED_REWARD_PAIRWISE",
    "VLM_JUDGE",
    "WISE",
    "unirl_rewards",
]

_EACH = {Cap.REWARD_SAMPLE}
_GROUPS = {Cap.REWARD_GROUP}
_EXAMPLES = (RewardExample(prompt="a red cube on a blue sphere"), RewardExample(prompt="two cats at a {table}"))
_SOURCE = MediaRef(modality="image", role="source", uri=str(Path(__file__).with_name("source.png")))
_EDITS = tuple(RewardExample(prompt=prompt, media=(_SOURCE,)) for prompt in ("make the disk green", "remove the disk"))


def _spec(name: str, config: str, *, build: str = "judge:build", **more: Any) -> RewardSpec:
    """By default a judge with a template."""
    is_judge = build.startswith("judge:")
    fields: dict[str, Any] = {
        "build": f"unirl.rewards.vlm.{build}",
        "config": f"unirl.rewards.vlm.config:{config}",
        "capabilities": _EACH,
        # Random weights write no answer that can be parsed; their expected scores are defined like any others.
        "trial": {"dtype": "float32", **({"answer": "expected"} if is_judge else {})},
        "tiny": "unirl.rewards.vlm.tiny:write",
        "examples": _EXAMPLES,
        "media": "any" if is_judge else "image",
        **({"range": (0.0, 1.0), "parts": ("raw",)} if is_judge else {}),
    }
    return RewardSpec(name=name, **{**fields, **more})


VLM_JUDGE = _spec(
    "vlm-judge",
    "JudgeConfig",
    summary="A VLM's answer to a prompt template of your own, in process or from an OpenAI-compatible endpoint",
    scale="the template's range brought to 0 to 1; several scores by their weights",
)

UNIFIED_REWARD = _spec(
    "unified-reward",
    "UnifiedRewardConfig",
    summary="UnifiedReward's pointwise score of an image or a video",
    scale="final score / 5, 0.2 to 1",
    range=(0.2, 1.0),
)

UNIFIED_REWARD_PAIRWISE = _spec(
    "unified-reward-pairwise",
    "PairwiseConfig",
    build="judge:build_pairwise",
    summary="Share of the other samples of its group that a VLM prefers a sample to",
    capabilities=_GROUPS,
    scale="mean preference over the other samples, 0 to 1; 0.5 where neither is better",
    parts=("compared", "unparsed"),
)

PAIR_JUDGE = _spec(
    "pair-judge",
    "PairJudgeConfig",
    build="judge:build_pairwise",
    summary="Share of the other completions of its group that a language model prefers a completion to",
    capabilities=_GROUPS,
    scale="mean preference over the other completions, 0 to 1; 0.5 where neither is better",
    examples=(
        RewardExample(prompt="What is 6 x 7?", text="6 x 7 = 42"),
        RewardExample(prompt="Why is the sky blue?", text="Air scatters blue light more than red {light}."),
    ),
    media="text",
    parts=("compared", "unparsed"),
)

WISE = _spec(
    "wise",
    "WiseConfig",
    summary="WiScore of prompts that need knowledge of the world: consistency, realism, aesthetic quality",
    scale="(0.7 consistency + 0.2 realism + 0.1 aesthetic) / 2, each 0 to 2; 0 to 1",
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

EDIT_JUDGE = _spec(
    "edit-judge",
    "EditJudgeConfig",
    summary="Whether an edited image follows its instruction, and how sound it is, beside the source image",
    scale="mean of following and quality, 1 to 4 each, brought to 0 to 1",
    examples=_EDITS,
    media="image",
    parts=("following", "quality"),
)

GENEVAL2 = _spec(
    "geneval2",
    "Geneval2Config",
    summary="GenEval 2's Soft-TIFA: the probability that a VLM answers questions about the image as expected",
    build="geneval2:build",
    scale="geometric or arithmetic mean of the probabilities, 0 to 1; strict: 1 if every answer is right, else 0",
    range=(0.0, 1.0),
    examples=(
        RewardExample(
            prompt="two green cats",
            metadata={
                "vqa_list": [["How many cats are in the image?", "two"], ["Are the cats green?", "Yes"]],
                "skills": ["count", "attribute"],
            },
        ),
        RewardExample(
            prompt="a dog that chases a ball",
            metadata={"vqa_list": [["Is the dog chasing the ball?", "Yes"]], "skills": ["verb"]},
        ),
    ),
    metadata=("vqa_list",),
    metadata_kinds={"vqa_list": ("a list",), "skills": ("a list",)},
    parts=("geometric", "arithmetic", "strict", "object", "count", "attribute", "position", "verb"),
)

HPSV3 = _spec(
    "hpsv3",
    "Hpsv3Config",
    summary="HPSv3, human preference as a mean and a sigma, from a reward head on Qwen2-VL",
    build="preference:build_hpsv3",
    tiny="unirl.rewards.vlm.tiny:write_hpsv3",
    scale="mu / 15, unbounded; good images are near 1",
    parts=("mu", "sigma"),
)

EDIT_REWARD = _spec(
    "edit-reward",
    "EditRewardConfig",
    summary="EditReward: how well an edit follows its instruction and looks, from two reward heads on Qwen2.5-VL",
    build="preference:build_edit_reward",
    tiny="unirl.rewards.vlm.tiny:write_edit_reward",
    scale="mean of the two heads' means, unbounded, as published",
    examples=_EDITS,
    parts=("following", "quality", "following_sigma", "quality_sigma"),
)


@hookimpl
def unirl_rewards() -> list[RewardSpec]:
    return [
        VLM_JUDGE,
        UNIFIED_REWARD,
        UNIFIED_REWARD_PAIRWISE,
        PAIR_JUDGE,
        WISE,
        EDIT_JUDGE,
        GENEVAL2,
        HPSV3,
        EDIT_REWARD,
    ]
