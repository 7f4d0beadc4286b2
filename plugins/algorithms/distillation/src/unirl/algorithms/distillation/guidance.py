"""Sampling without guidance, for losses that guide another policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from unirl.numerics.diffusion.guidance import Guidance

__all__ = ["WithNegatives"]


@dataclass(frozen=True, kw_only=True)
class WithNegatives(Guidance):
    """The velocity under the positive conditions, in one forward. The negative prompt is encoded beside them, so that a
    loss can guide a teacher on samples that were made without guidance (`stages.NAME.reference_guidance`).

    Raises ValueError for a scale other than 1.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale != 1.0:
            raise ValueError(
                f"guidance '{self.name}': got scale {self.scale}, expected 1: it samples without guidance."
            )

    @property
    def branches(self) -> tuple[str, ...]:
        return ("positive", "negative")

    @property
    def computed_branches(self) -> tuple[str, ...]:
        return ("positive",)

    def combine(self, velocities: Mapping[str, Tensor], sigma: Tensor) -> Tensor:
        return velocities["positive"]
