"""Rewards that are read off the sample by rule."""

from __future__ import annotations

from unirl.core.capability import Cap, Support
from unirl.core.hookspec import hookimpl
from unirl.core.spec import RewardExample, RewardSpec

__all__ = ["BRIGHTNESS", "EXACT_MATCH", "JPEG_SIZE", "PIXEL_TARGET", "SHAPES", "unirl_rewards"]

_PLAIN = {
    Cap.REWARD_SAMPLE: Support.NATIVE,
    Cap.REWARD_GROUP: Support.NO,
    Cap.REWARD_DIFFERENTIABLE: Support.NO,
}

SHAPES = RewardSpec(
    name="shapes",
    summary="Colour, shape and place of the one shape in a 64 px image, against the prompt's metadata",
    build="unirl.rewards.rules.shapes:build",
    config="unirl.rewards.rules.config:ShapesConfig",
    capabilities=_PLAIN,
    scale="share of right answers among colour, shape and place: 0, 1/3, 2/3 or 1",
    range=(0.0, 1.0),
    examples=(
        RewardExample(prompt="a red square on the left", metadata={"color": "red", "shape": "square", "place": "left"}),
        RewardExample(prompt="a blue ring at the top", metadata={"color": "blue", "shape": "ring", "place": "top"}),
    ),
    media="image",
    metadata=("color", "shape", "place"),
    parts=("color", "shape", "place", "perfect"),
)

JPEG_SIZE = RewardSpec(
    name="jpeg-size",
    summary="Size of the image as a JPEG file: reward detail, or reward smoothness",
    build="unirl.rewards.rules.jpeg:build",
    config="unirl.rewards.rules.config:JpegSizeConfig",
    capabilities=_PLAIN,
    scale="kilobytes (1000 bytes) of the JPEG file, unbounded; their negative with prefer=small",
    media="image",
)

BRIGHTNESS = RewardSpec(
    name="brightness",
    summary="Mean luma of the image",
    build="unirl.rewards.rules.brightness:build",
    config="unirl.rewards.rules.config:BrightnessConfig",
    capabilities=_PLAIN,
    scale="mean Rec. 601 luma, 0 (black) to 1 (white)",
    range=(0.0, 1.0),
    media="image",
)

EXACT_MATCH = RewardSpec(
    name="exact-match",
    summary="Whether the text is the prompt's answer, after a stated normalisation",
    build="unirl.rewards.rules.exact_match:build",
    config="unirl.rewards.rules.config:ExactMatchConfig",
    capabilities=_PLAIN,
    scale="1 if the text equals metadata `answer`, else 0",
    range=(0.0, 1.0),
    examples=(
        RewardExample(prompt="What is 6 x 7?", metadata={"answer": "42"}, text="42"),
        RewardExample(prompt="The capital of France?", metadata={"answer": "Paris"}, text=" paris\n"),
    ),
    media="text",
    metadata=("answer",),
)

PIXEL_TARGET = RewardSpec(
    name="pixel-target",
    summary="Closeness of the pixels to one colour or one image; differentiable",
    build="unirl.rewards.rules.pixel_target:build",
    config="unirl.rewards.rules.config:PixelTargetConfig",
    capabilities={**_PLAIN, Cap.REWARD_DIFFERENTIABLE: Support.NATIVE},
    scale="negative mean squared distance to the target, -1 to 0",
    range=(-1.0, 0.0),
    media="image",
)


@hookimpl
def unirl_rewards() -> list[RewardSpec]:
    return [SHAPES, JPEG_SIZE, BRIGHTNESS, EXACT_MATCH, PIXEL_TARGET]
