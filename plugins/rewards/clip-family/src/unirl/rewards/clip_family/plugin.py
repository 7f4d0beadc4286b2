"""Rewards of contrastive image-text encoders, of images and frames; all differentiable with respect to the pixels."""

from __future__ import annotations

import dataclasses

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import RewardExample, RewardSpec

__all__ = [
    "AESTHETIC",
    "CLIPSCORE",
    "CLIP_DIVERSITY",
    "HPSV2",
    "IMAGE_REWARD",
    "PICKSCORE",
    "SIGLIP",
    "VIDEO_PICKSCORE",
    "unirl_rewards",
]

_HERE = "unirl.rewards.clip_family"
_CAPABILITIES = {Cap.REWARD_SAMPLE, Cap.REWARD_DIFFERENTIABLE}
# Sizes that the preprocessing enlarges, reduces and crops.
_EXAMPLES = (
    RewardExample(prompt="a photo of a cat", height=48, width=48),
    RewardExample(prompt="two red kites over a hill at dawn", height=48, width=48),
    RewardExample(prompt="Ein Haus am See", height=40, width=56),
)
_TEXT_PARTS = ("raw", "truncated")

CLIPSCORE = RewardSpec(
    name="clipscore",
    summary="Cosine of image and prompt under CLIP ViT-L/14",
    build=f"{_HERE}.dual_encoders:build_clipscore",
    config=f"{_HERE}.config:ClipScoreConfig",
    capabilities=_CAPABILITIES,
    scale="cosine, -1 to 1; about 0.15 to 0.35 on photos. Part `raw` is 100 times that",
    range=(-1.0, 1.0),
    examples=_EXAMPLES,
    media="image",
    parts=_TEXT_PARTS,
    tiny=f"{_HERE}.tiny:write_clip",
)

CLIP_DIVERSITY = RewardSpec(
    name="clip-diversity",
    summary="Distance to the other images of the prompt in CLIP's features",
    build=f"{_HERE}.diversity:build",
    config=f"{_HERE}.config:ClipDiversityConfig",
    capabilities={Cap.REWARD_GROUP},
    scale="1 less the cosine, 0 (all alike, or an image alone) to 2",
    range=(0.0, 2.0),
    examples=_EXAMPLES,
    media="image",
    tiny=f"{_HERE}.tiny:write_clip",
)

PICKSCORE = RewardSpec(
    name="pickscore",
    summary="PickScore v1: preference of Pick-a-Pic users, CLIP ViT-H/14",
    build=f"{_HERE}.dual_encoders:build_pickscore",
    config=f"{_HERE}.config:PickScoreConfig",
    capabilities=_CAPABILITIES,
    scale="logit scale x cosine / 26, about 0.7 to 0.95, unbounded. Part `raw` is 26 times that, about 18 to 24",
    examples=_EXAMPLES,
    media="image",
    parts=_TEXT_PARTS,
    tiny=f"{_HERE}.tiny:write_clip",
)

VIDEO_PICKSCORE = RewardSpec(
    name="video-pickscore",
    summary="Mean PickScore v1 of frames at equal distances; does not see motion",
    build=f"{_HERE}.video_frames:build_video_pickscore",
    config=f"{_HERE}.config:VideoPickScoreConfig",
    capabilities=_CAPABILITIES,
    trial={"num_frames": 3},
    scale="mean of PickScores, about 0.7 to 0.95, unbounded. Part `raw` is 26 times that",
    examples=tuple(dataclasses.replace(example, frames=4) for example in _EXAMPLES[1:]),
    media="video",
    parts=_TEXT_PARTS,
    tiny=f"{_HERE}.tiny:write_clip",
)

HPSV2 = RewardSpec(
    name="hpsv2",
    summary="Human Preference Score v2.1, CLIP ViT-H/14",
    build=f"{_HERE}.dual_encoders:build_hpsv2",
    config=f"{_HERE}.config:HpsV2Config",
    capabilities=_CAPABILITIES,
    scale="cosine, -1 to 1; about 0.2 to 0.4. Part `raw` is the same number",
    range=(-1.0, 1.0),
    examples=_EXAMPLES,
    media="image",
    parts=_TEXT_PARTS,
    tiny=f"{_HERE}.tiny:write_hpsv2",
)

AESTHETIC = RewardSpec(
    name="aesthetic",
    summary="LAION aesthetic predictor v2 on CLIP ViT-L/14; does not read the prompt",
    build=f"{_HERE}.dual_encoders:build_aesthetic",
    config=f"{_HERE}.config:AestheticConfig",
    capabilities=_CAPABILITIES,
    scale="predicted rating, about 1 to 10, unbounded. Part `raw` is the same number",
    examples=_EXAMPLES,
    media="image",
    parts=("raw",),
    tiny=f"{_HERE}.tiny:write_aesthetic",
)

IMAGE_REWARD = RewardSpec(
    name="image-reward",
    summary="ImageReward v1.0: BLIP that reads the prompt with the image",
    build=f"{_HERE}.image_reward:build",
    config=f"{_HERE}.config:ImageRewardConfig",
    capabilities=_CAPABILITIES,
    scale="standardised reward, about -2 to 2, unbounded. Part `raw` is the head's output, before (x - 0.167) / 1.033",
    examples=_EXAMPLES,
    media="image",
    parts=_TEXT_PARTS,
    tiny=f"{_HERE}.tiny:write_image_reward",
)

SIGLIP = RewardSpec(
    name="siglip",
    summary="Cosine of image and prompt under SigLIP",
    build=f"{_HERE}.dual_encoders:build_siglip",
    config=f"{_HERE}.config:SiglipConfig",
    capabilities=_CAPABILITIES,
    scale="cosine, -1 to 1. Part `raw` is the logit, `probability` its sigmoid",
    range=(-1.0, 1.0),
    examples=_EXAMPLES,
    media="image",
    parts=(*_TEXT_PARTS, "probability"),
    tiny=f"{_HERE}.tiny:write_siglip",
)


@hookimpl
def unirl_rewards() -> list[RewardSpec]:
    return [AESTHETIC, CLIPSCORE, CLIP_DIVERSITY, HPSV2, IMAGE_REWARD, PICKSCORE, SIGLIP, VIDEO_PICKSCORE]
