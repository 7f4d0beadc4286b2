"""Colours of the pictures, one set for light and one for dark surroundings; the page's style sheet uses the same."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DARK", "LIGHT", "Theme"]


@dataclass(frozen=True, kw_only=True)
class Theme:
    ground: str
    ink: str
    faint: str
    """Axes, ticks and secondary text."""
    grid: str
    series: tuple[str, ...]
    """Told apart by people with any colour vision, in this order."""


LIGHT = Theme(
    ground="#ffffff",
    ink="#1b2230",
    faint="#5d6879",
    grid="#e3e7ee",
    series=("#2463d1", "#d9730d", "#15936b", "#8a4fd3", "#c2344d", "#5f7186", "#0d96b8", "#a87f00"),
)
DARK = Theme(
    ground="#161b24",
    ink="#e8ecf3",
    faint="#9aa6b8",
    grid="#2a3240",
    series=("#6ea2ff", "#f6a04d", "#45c99a", "#b98cff", "#f2768c", "#9db0c7", "#4cc7e6", "#e0b93f"),
)
