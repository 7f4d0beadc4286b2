"""Rewards of videos."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import RewardExample, RewardSpec
from unirl.core.types.data import MediaRef

__all__ = ["FIRST_FRAME", "MOTION", "SOFT_MOTION", "TEMPORAL", "VIDEOALIGN", "unirl_rewards"]

_HERE = "unirl.rewards.video"
_SMOOTH = {Cap.REWARD_SAMPLE, Cap.REWARD_DIFFERENTIABLE}
_MOVING = (
    RewardExample(prompt="a red ring rolls to the right", metadata={"motion": "right"}, height=40, width=56, frames=4),
    RewardExample(prompt="a still life", metadata={"motion": "still"}, height=40, width=56, frames=4),
    RewardExample(prompt="rain", metadata={"motion": [0.0, 0.5]}, height=40, width=56, frames=4),
)

VIDEOALIGN = RewardSpec(
    name="videoalign",
    summary="VideoAlign's VideoReward: visual quality, motion quality and text alignment, from a head on Qwen2-VL",
    build=f"{_HERE}.videoalign:build",
    config=f"{_HERE}.config:VideoAlignConfig",
    capabilities=_SMOOTH,
    trial={"dtype": "float32"},
    scale="sum of vq, mq and ta, each standardised with the checkpoint's mean and deviation, or one of them; unbounded",
    examples=(
        RewardExample(prompt="a red cube on a blue sphere", height=40, width=56, frames=5),
        RewardExample(prompt="two cats at a {table}", height=40, width=56, frames=5),
    ),
    media="video",
    parts=("vq", "mq", "ta", "raw_vq", "raw_mq", "raw_ta"),
    tiny=f"{_HERE}.tiny:write_videoalign",
)

MOTION = RewardSpec(
    name="motion",
    summary="Whether a video moves in a direction, with a velocity or not at all, by phase correlation",
    build=f"{_HERE}.motion:build",
    config=f"{_HERE}.config:MotionConfig",
    capabilities=_SMOOTH - {Cap.REWARD_DIFFERENTIABLE},
    scale="a direction: -1 to 1; a velocity or `still`: 0 to 1, 0.5 where it is `speed` shorter edges per second away",
    range=(-1.0, 1.0),
    examples=_MOVING,
    media="video",
    metadata=("motion",),
    metadata_kinds={"motion": ("text", "a list")},
    parts=("x", "y", "speed"),
)

SOFT_MOTION = dataclasses.replace(
    MOTION,
    name="soft-motion",
    summary="The score of `motion` by least-squares flow, for slow motion; differentiable",
    build=f"{_HERE}.motion:build_soft",
    config=f"{_HERE}.config:SoftMotionConfig",
    capabilities=_SMOOTH,
)

TEMPORAL = RewardSpec(
    name="temporal",
    summary="Whether a video changes smoothly and without flicker",
    build=f"{_HERE}.temporal:build",
    config=f"{_HERE}.config:TemporalConfig",
    capabilities=_SMOOTH,
    scale="mean of smoothness and steadiness, 0 to 1; 1 is a video whose pixels change evenly, or not at all",
    range=(0.0, 1.0),
    media="video",
    parts=("smoothness", "steadiness", "change"),
)

FIRST_FRAME = RewardSpec(
    name="first-frame",
    summary="Closeness of the first frame to the image that the prompt gives as `first_frame`",
    build=f"{_HERE}.first_frame:build",
    config=f"{_HERE}.config:FirstFrameConfig",
    capabilities=_SMOOTH,
    scale="1 - root mean square difference of the pixels, 0 to 1",
    range=(0.0, 1.0),
    examples=(
        RewardExample(
            prompt="the disk rolls away",
            media=(
                MediaRef(modality="image", role="first_frame", uri=str(Path(__file__).with_name("first_frame.png"))),
            ),
            frames=2,
        ),
    ),
    media="video",
)


@hookimpl
def unirl_rewards() -> list[RewardSpec]:
    return [VIDEOALIGN, MOTION, SOFT_MOTION, TEMPORAL, FIRST_FRAME]
