"""Counts what training takes: rows through the trainable module, samples, CPU time and wall time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .budget import Spent

__all__ = ["Meter"]


class Meter:
    """Spent by the steps alone: call `begin` before a step and `end` after it; what lies between steps is not counted.

    A row through the trainable module counts once for each pass, whichever policy's weights it holds. Where its input
    is token ids, tokens count instead of rows.
    """

    def __init__(self, module: nn.Module) -> None:
        self.spent = Spent()
        self._is_on = False
        self._forwards = self._backwards = 0
        self._began = (0.0, 0.0)
        module.register_forward_hook(self._passed, with_kwargs=True)

    def begin(self) -> None:
        self._is_on, self._forwards, self._backwards = True, 0, 0
        self._began = (time.process_time(), time.perf_counter())

    def end(self, *, samples: int) -> Spent:
        """The total after this step. samples: that it generated."""
        cpu_s, wall_s = time.process_time() - self._began[0], time.perf_counter() - self._began[1]
        self._is_on, before = False, self.spent
        self.spent = Spent(
            steps=before.steps + 1,
            samples=before.samples + samples,
            forwards=before.forwards + self._forwards,
            backwards=before.backwards + self._backwards,
            cpu_s=before.cpu_s + cpu_s,
            wall_s=before.wall_s + wall_s,
        )
        return self.spent

    def _passed(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not self._is_on:
            return
        first = next(_tensors([args, kwargs]), None)
        size = 0 if first is None else first.shape[0] if first.is_floating_point() else first.numel()
        self._forwards += size
        result = next((one for one in _tensors(output) if one.requires_grad), None)
        if torch.is_grad_enabled() and result is not None:
            # Once for each backward pass: a gradient arrives at a tensor when all of it is known.
            result.register_hook(lambda gradient: self._add(size))

    def _add(self, size: int) -> None:
        self._backwards += size * self._is_on


def _tensors(value: Any) -> Iterator[Tensor]:
    """Tensors in nested sequences and mappings, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
