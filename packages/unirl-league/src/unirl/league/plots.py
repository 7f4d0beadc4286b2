"""Curves of a league as SVG."""

from __future__ import annotations

import io
from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from .summary import Curve

__all__ = ["draw"]

COLORS = ("#2463d1", "#d9730d", "#15936b", "#8a4fd3", "#c2344d", "#5f7186", "#0d96b8", "#a87f00")
STYLES = ("-", "--", ":", "-.")


def draw(curves: Sequence[Curve], *, x_label: str, y_label: str) -> str:
    """An `<svg>` element: the mean of each algorithm over its seeds, and a band from the smallest to the largest."""
    # Text stays text, so that it can be searched; equal input gives equal output.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": x_label}):
        figure = Figure(figsize=(8.4, 4.6))
        FigureCanvasSVG(figure)
        axes = figure.add_axes((0.09, 0.13, 0.64, 0.82))
        for index, one in enumerate(curves):
            color, style = COLORS[index % len(COLORS)], STYLES[index // len(COLORS) % len(STYLES)]
            axes.plot(one.x, one.mean, color=color, ls=style, lw=2, label=one.algorithm)
            axes.fill_between(one.x, one.low, one.high, color=color, alpha=0.13, lw=0)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.grid(visible=True, color="#e3e7ee")
        axes.spines[["top", "right"]].set_visible(False)
        if curves:
            axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=9)
        content = io.StringIO()
        figure.savefig(content, format="svg", metadata={"Date": None, "Creator": None})
    text = content.getvalue()
    return text[text.index("<svg") :]
