"""Colours of pictures and pages, one set for light and one for dark surroundings."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DARK", "LIGHT", "Theme", "style_variables"]


@dataclass(frozen=True, kw_only=True)
class Theme:
    page: str
    """Behind everything."""
    ground: str
    """Background of sections and pictures."""
    shade: str
    """Background of tiles and labels."""
    ink: str
    faint: str
    """Axes, ticks and secondary text."""
    grid: str
    series: tuple[str, ...]
    """Told apart by people with any colour vision, in this order."""


LIGHT = Theme(
    page="#f4f6f9",
    ground="#ffffff",
    shade="#eef1f6",
    ink="#1b2230",
    faint="#5d6879",
    grid="#e3e7ee",
    series=("#2463d1", "#d9730d", "#15936b", "#8a4fd3", "#c2344d", "#5f7186", "#0d96b8", "#a87f00"),
)
DARK = Theme(
    page="#0d1118",
    ground="#161b24",
    shade="#1e2530",
    ink="#e8ecf3",
    faint="#9aa6b8",
    grid="#2a3240",
    series=("#6ea2ff", "#f6a04d", "#45c99a", "#b98cff", "#f2768c", "#9db0c7", "#4cc7e6", "#e0b93f"),
)


def style_variables() -> str:
    """The colours as variables of a style sheet, light ones and, for readers who prefer them, dark ones."""
    return f":root {{ {_variables(LIGHT)} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}"


def _variables(theme: Theme) -> str:
    named = {
        **{"page": theme.page, "ground": theme.ground, "shade": theme.shade, "ink": theme.ink, "faint": theme.faint},
        **{"line": theme.grid, "blue": theme.series[0], "orange": theme.series[1], "good": theme.series[2]},
        **{"bad": theme.series[4], **{f"series{at}": color for at, color in enumerate(theme.series)}},
    }
    return " ".join(f"--{name}: {color};" for name, color in named.items())
