"""Rewards that look for what the prompt asks for: objects and text."""

from __future__ import annotations

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import RewardExample, RewardSpec

__all__ = ["GENEVAL", "OCR", "unirl_rewards"]

_PLAIN = {Cap.REWARD_SAMPLE}

GENEVAL = RewardSpec(
    name="geneval",
    summary="Objects, counts, colours and positions in the image, by GenEval's rules over a detector",
    build="unirl.rewards.detect.geneval:build",
    config="unirl.rewards.detect.config:GenevalConfig",
    capabilities=_PLAIN,
    scale="soft: mean degree to which the requirements are met, 0 to 1; strict: 1 if all are met, else 0",
    range=(0.0, 1.0),
    examples=(
        RewardExample(
            prompt="a photo of two cats",
            metadata={
                "tag": "counting",
                "include": [{"class": "cat", "count": 2}],
                "exclude": [{"class": "cat", "count": 3}],
            },
        ),
        RewardExample(
            prompt="a photo of a red dog right of a cat",
            metadata={
                "tag": "position",
                "include": [
                    {"class": "cat", "count": 1},
                    {"class": "dog", "count": 1, "color": "red", "position": ["right of", 0]},
                ],
            },
        ),
    ),
    media="image",
    metadata=("tag", "include"),
    metadata_kinds={"tag": ("text",), "include": ("a list",), "exclude": ("a list",)},
    parts=("strict", "soft", "count", "color", "position"),
    tiny="unirl.rewards.detect.tiny:write",
)

OCR = RewardSpec(
    name="ocr",
    summary="Whether the image has the text that the prompt asks for, read by PP-OCR",
    build="unirl.rewards.detect.ocr:build",
    config="unirl.rewards.detect.config:OcrConfig",
    capabilities=_PLAIN,
    scale="agreement of the text in the image with the target: 0 to 1",
    range=(0.0, 1.0),
    examples=(
        RewardExample(
            prompt='a sign that says "OPEN"', draw="unirl.rewards.detect.lettering:draw", height=64, width=192
        ),
        RewardExample(
            prompt="a shop sign that reads “Cafe 24”",
            metadata={"text": "Cafe 24"},
            draw="unirl.rewards.detect.lettering:draw",
            height=64,
            width=192,
        ),
    ),
    media="image",
    metadata_kinds={"text": ("text",)},
    parts=("similarity", "exact", "substring", "contained", "precision"),
    # Enlarging each image of a few pixels takes most of the time.
    trial={"min_side_px": 64, "processes": 1},
)


@hookimpl
def unirl_rewards() -> list[RewardSpec]:
    return [GENEVAL, OCR]
