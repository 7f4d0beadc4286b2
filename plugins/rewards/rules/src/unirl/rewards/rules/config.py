"""Settings of the rule rewards."""

from __future__ import annotations

from dataclasses import dataclass, field

from unirl.core.config import RewardConfig

__all__ = ["BrightnessConfig", "ExactMatchConfig", "JpegSizeConfig", "PixelTargetConfig", "ShapesConfig"]


@dataclass
class ShapesConfig(RewardConfig):
    pass


@dataclass
class JpegSizeConfig(RewardConfig):
    quality: int = 95
    """JPEG quality of Pillow, 1 to 95."""
    prefer: str = "large"
    """`large` rewards files that hardly compress, `small` those that compress well."""


@dataclass
class BrightnessConfig(RewardConfig):
    pass


@dataclass
class ExactMatchConfig(RewardConfig):
    ignore_case: bool = True
    """Compare case-folded. White space at the ends and its amount elsewhere never count."""


@dataclass
class PixelTargetConfig(RewardConfig):
    color: list[float] = field(default_factory=lambda: [1.0, 1.0, 1.0])
    """Red, green and blue of the target, each in [0, 1]; used when `image` is empty."""
    image: str = ""
    """Image file of the target; it must have the size of the samples."""
