"""State of a model that others must leave alone: weights, gradients and the modes of its modules."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor, equal, nn
from unirl.core.roles import Model

__all__ = ["changes_of", "copy_modes", "mix_modes", "model_state"]


def model_state(model: Model) -> Mapping[str, object]:
    module: nn.Module = model.trainable
    return {
        "the training mode of submodules": [part.training for part in module.modules()],
        "requires_grad": [param.requires_grad for param in module.parameters()],
        "gradients": [param.grad is None for param in module.parameters()],
        "weights": {name: value.detach().clone() for name, value in module.state_dict().items()},
    }


def mix_modes(model: Model) -> None:
    """Put the module in training mode, and its first leaf in evaluation mode: `train()` on the whole does not restore
    that."""
    module: nn.Module = model.trainable
    module.train()
    next(part for part in module.modules() if not any(True for _ in part.children())).eval()


def copy_modes(source: Model, target: Model) -> None:
    """Give each module of the target the training mode of the module of this name."""
    modes = {name: part.training for name, part in source.trainable.named_modules()}
    for name, part in target.trainable.named_modules():
        part.training = modes.get(name, part.training)


def changes_of(before: Mapping[str, object], after: Mapping[str, object]) -> str:
    """Names of the entries that differ."""
    return ", ".join(name for name, value in before.items() if not _same(value, after[name]))


def _same(one: object, other: object) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return equal(one, other)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return one == other
