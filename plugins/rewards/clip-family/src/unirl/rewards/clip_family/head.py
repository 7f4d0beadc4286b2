"""The head of the aesthetic predictor and of ImageReward: five linear layers without activations between them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn
from unirl.core.errors import RecipeError
from unirl.model_host.state_dicts import fill

__all__ = ["build_head"]

_NUMBERS = (0, 2, 4, 6, 7)
"""Indices of the linear layers in the published files; the others were dropout."""


def build_head(state: Mapping[str, Tensor], *, width: int, key: str, file: Path) -> nn.Sequential:
    """[n, width] -> [n, 1], in fp32. state: `layers.0.weight` and so on.

    Raises RecipeError for a head of other layers (one with activations has other numbers) or for another width.
    """
    weights = [state.get(f"layers.{number}.weight") for number in _NUMBERS]
    shapes = [tuple(weight.shape) for weight in weights if weight is not None]
    chain = [width, *(shape[0] for shape in shapes)]
    if len(shapes) != len(_NUMBERS) or shapes != list(zip(chain[1:], chain, strict=False)) or chain[-1] != 1:
        raise RecipeError(
            f"{key}: {str(file)!r} got layers of shapes {shapes}, expected {len(_NUMBERS)} linear layers, named "
            f"layers.0.weight to layers.{_NUMBERS[-1]}.weight, from {width} features to 1. Give this encoder's head."
        )
    layers = zip(_NUMBERS, shapes, strict=True)
    head = nn.Sequential(OrderedDict((str(number), nn.Linear(columns, rows)) for number, (rows, columns) in layers))
    fill(head, {name.removeprefix("layers."): value for name, value in state.items()}, key=key, file=file)
    return head
