"""The scores of several rewards as they count: clipped, and only where their gates let them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from ..match.composition import counted_range
from ..specs.config import RewardConfig
from ..specs.plan import Choice
from ..specs.spec import RewardSpec

if TYPE_CHECKING:
    from ..types.array import Array

__all__ = ["RewardChoices", "counted_scores", "reaches"]

RewardChoices: TypeAlias = Mapping[str, Choice[RewardSpec, RewardConfig]]
ROUNDING = 1e-6
"""Scores are sums of floats: a sample that meets a threshold exactly must not miss it by rounding."""


def reaches(values: Array, threshold: float) -> Array:
    """[N] bool, for scores [N]."""
    return values >= threshold - ROUNDING


def counted_scores(scores: Mapping[str, Array], choices: RewardChoices | None) -> dict[str, Array]:
    """What counts of each reward's scores [N], of which NaN is none. Differentiable.

    A score beyond `clip` is moved to it, and a sample that fails the gate gets the lowest score that can count. It
    passes where the gate's reward scores high enough and its own gate, if it has one, passes too.
    """
    return {name: _counted(name, scores, choices) if choices else values for name, values in scores.items()}


def _counted(name: str, scores: Mapping[str, Array], choices: RewardChoices) -> Array:
    choice, values = choices[name], scores[name]
    if choice.config.clip is not None:
        values = values.clamp(*choice.config.clip)
    if choice.config.gate.reward:
        passes, lowest = _passes(name, scores, choices), counted_range(choice)[0]
        values = values.where(values.isnan() | (passes > 0), lowest).where(~passes.isnan(), float("nan"))
    return values


def _passes(name: str, scores: Mapping[str, Array], choices: RewardChoices) -> Array:
    """[N]: 1, 0, or NaN where it is not known."""
    gate = choices[name].config.gate
    assert gate.at_least is not None, "match() refuses a gate without a threshold"
    values = scores[gate.reward].detach()
    passes = reaches(values, gate.at_least).to(values.dtype).where(~values.isnan(), float("nan"))
    return passes * _passes(gate.reward, scores, choices) if choices[gate.reward].config.gate.reward else passes
