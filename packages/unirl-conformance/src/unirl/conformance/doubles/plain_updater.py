"""An optimizer in ten lines, so that the train stack can run without a backend, and gradients can be looked at."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from unirl.numerics.train.stack import StepReport

__all__ = ["PlainUpdater"]


class PlainUpdater:
    """Plain gradient descent on a module. Fits `unirl.numerics.train.stack.Updater` on one rank.

    `gradients` holds those of the last update, name -> tensor, also of weights that got none (zeros).
    """

    gradient_reduction: Literal["mean", "sum"] = "sum"
    num_ranks = 1

    def __init__(self, module: torch.nn.Module, *, lr: float = 0.0, length: float | None = None) -> None:
        """length: of every step, in place of a learning rate."""
        self._length = length
        self._params = {name: param for name, param in module.named_parameters() if param.requires_grad}
        self.lr = lr
        self.device = next(iter(self._params.values())).device
        self.gradients: dict[str, Tensor] = {}

    def zero_grad(self) -> None:
        for param in self._params.values():
            param.grad = None

    def backward(self, loss: Tensor, *, last: bool) -> None:
        # An algorithm may give a loss that depends on no weight, when all advantages are 0.
        if loss.requires_grad:
            loss.backward()

    def step(self) -> StepReport:
        self.gradients = {
            name: torch.zeros_like(param) if param.grad is None else param.grad.detach().clone()
            for name, param in self._params.items()
        }
        squares = sum(float(grad.double().square().sum()) for grad in self.gradients.values())
        count = sum(grad.numel() for grad in self.gradients.values())
        lr = self.lr if self._length is None else self._length / max(squares**0.5, 1e-30)
        with torch.no_grad():
            for name, param in self._params.items():
                param.sub_(lr * self.gradients[name])
        return StepReport(grad_norm=squares**0.5, grad_rms=(squares / count) ** 0.5)

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        return values

    def all_reduce_max(self, values: Tensor) -> Tensor:
        return values
