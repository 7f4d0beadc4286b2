"""Settings of the CLIP, SigLIP and BLIP rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from unirl.core.acceleration import NARROW, Acceleration
from unirl.core.limits import limit, one_of
from unirl.core.specs.part_config import RewardConfig
from unirl.core.types.media import spread

__all__ = [
    "AestheticConfig",
    "ClipDiversityConfig",
    "ClipScoreConfig",
    "EncoderConfig",
    "HpsV2Config",
    "ImageRewardConfig",
    "PickScoreConfig",
    "SiglipConfig",
    "VideoPickScoreConfig",
]


@dataclass
class EncoderConfig(RewardConfig):
    """Settings that all of them have."""

    path: str = ""
    """Folder of the checkpoint, or its hub id."""
    processor: str = ""
    """Folder or hub id of the tokenizer and `preprocessor_config.json`; empty takes those in `path`."""
    dtype: str = one_of("float32", "bfloat16", default="float32")
    """Precision of the encoders. Preprocessing, cosines and heads are always in fp32."""
    batch_size: int = limit(16, least=1)
    """Images per forward pass. Never changes the scores."""

    rounding_only = ("batch_size",)
    accelerations: ClassVar[Mapping[str, Acceleration]] = {"dtype": Acceleration(scope="reward", error=NARROW)}

    def device_weights(self) -> Mapping[str, str]:
        return {".path": self.dtype}


@dataclass
class ClipScoreConfig(EncoderConfig):
    path: str = "openai/clip-vit-large-patch14"


@dataclass
class ClipDiversityConfig(EncoderConfig):
    path: str = "openai/clip-vit-large-patch14"
    to: str = one_of("all", "nearest", default="all")
    """The mean distance to the other samples of the group, or the distance to the `nearest`."""


@dataclass
class PickScoreConfig(EncoderConfig):
    path: str = "yuvalkirstain/PickScore_v1"
    processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"


@dataclass
class VideoPickScoreConfig(PickScoreConfig):
    num_frames: int = limit(8, least=1)
    """Frames of a video that are scored, at equal distances, the first and the last among them; 1 is the first."""

    def frames_read(self, num_frames: int) -> Sequence[int]:
        return spread(self.num_frames, num_frames)


@dataclass
class HpsV2Config(EncoderConfig):
    path: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    """Folder or hub id of the architecture: `config.json`, the tokenizer and `preprocessor_config.json`. Its weights
    are not used."""
    weights: str = "xswu/HPSv2/HPS_v2.1_compressed.pt"
    """Weights in open_clip's names: a `.pt` or `.safetensors` file, or a file on the hub as `owner/name/file`."""

    def device_weights(self) -> Mapping[str, str]:
        return {".weights": self.dtype}


@dataclass
class AestheticConfig(EncoderConfig):
    path: str = "openai/clip-vit-large-patch14"
    head: str = ""
    """The aesthetic predictor, `sac+logos+ava1-l14-linearMSE.pth`, or a file on the hub as `owner/name/file`."""

    def device_weights(self) -> Mapping[str, str]:
        return {".path": self.dtype, ".head": "float32"}


@dataclass
class ImageRewardConfig(EncoderConfig):
    path: str = "zai-org/ImageReward"
    """Folder or hub id with `ImageReward.pt` and `med_config.json`."""
    processor: str = "google-bert/bert-base-uncased"
    """Folder or hub id of the tokenizer."""


@dataclass
class SiglipConfig(EncoderConfig):
    path: str = "google/siglip-so400m-patch14-384"
