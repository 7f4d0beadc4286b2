"""Settings of the rule rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from unirl.core.limits import Reason, limit, one_of
from unirl.core.specs.part_config import RewardConfig

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = [
    "BrightnessConfig",
    "DiversityConfig",
    "EditConfig",
    "ExactMatchConfig",
    "FunctionConfig",
    "JpegSizeConfig",
    "MovingShapesConfig",
    "PixelTargetConfig",
    "ShapesConfig",
    "SoftShapesConfig",
]


@dataclass
class ShapesConfig(RewardConfig):
    pass


@dataclass
class SoftShapesConfig(RewardConfig):
    pass


@dataclass
class EditConfig(RewardConfig):
    pass


@dataclass
class MovingShapesConfig(RewardConfig):
    pass


@dataclass
class JpegSizeConfig(RewardConfig):
    quality: int = limit(95, least=1, most=95)
    """JPEG quality as in Pillow, 1 to 95."""
    prefer: str = one_of("large", "small", default="large")
    """`large` rewards images that compress poorly, `small` those that compress well."""


@dataclass
class BrightnessConfig(RewardConfig):
    pass


@dataclass
class DiversityConfig(RewardConfig):
    to: str = one_of("all", "nearest", default="all")
    """The mean distance to the other samples of the group, or the distance to the `nearest`."""


@dataclass
class ExactMatchConfig(RewardConfig):
    ignore_case: bool = True
    """Ignore case. Leading and trailing white space, and the amount of it elsewhere, are always ignored."""


@dataclass
class PixelTargetConfig(RewardConfig):
    color: list[float] = limit([1.0, 1.0, 1.0], least=0, most=1, length=3)
    """Target colour as red, green and blue, each in [0, 1]; used when `image` is empty."""
    image: str = ""
    """Target image file; it must have the size of the samples."""

    def read_files(self) -> Mapping[str, Path]:
        return {".image": Path(self.image).expanduser()} if self.image else {}


@dataclass
class FunctionConfig(RewardConfig):
    other_names: ClassVar[tuple[str, ...]] = ("prompts", "images", "videos", "completions")
    target: str = ""
    """The function: `file.py:function`, with a path from the current folder, or `package.module:function`."""

    def __post_init__(self) -> None:
        # A worker may have another current folder.
        file, colon, name = self.target.rpartition(":")
        if colon and file.endswith(".py"):
            self.target = f"{Path(file).expanduser().absolute()}:{name}"

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Also a missing function or one for another medium, as far as can be told without running it."""
        from .function_target import Target, problems

        yield from super().problems(plan, stage)
        try:
            target = Target.of(self.target)
        except ValueError as error:
            yield Reason(key=".target", text=str(error))
            return
        if stage is not None:
            yield from (Reason(key=".target", text=text) for text in problems(target, medium=stage.medium))

    def required_metadata(self) -> Sequence[str]:
        """Parameters without a default that are not media or prompts, as far as can be told without running it."""
        from .function_target import Target, required_columns

        return required_columns(Target.of(self.target))

    def named_code(self) -> Mapping[str, str | Path]:
        """The file of the function, or `module:function`; one that the module only imports is not of its package."""
        from .function_target import Target, is_defined

        try:
            target = Target.of(self.target)
        except ValueError:
            return {}  # `problems` names it
        if target.is_file:
            return {".target": Path(target.module)}
        return {".target": str(target) if is_defined(target) else f"{target}, which is not defined there"}

    def read_files(self) -> Mapping[str, Path]:
        """The file of the function. Modules that it imports are not included."""
        from .function_target import Target

        file = Target.of(self.target).file
        return {".target": file} if file else {}
