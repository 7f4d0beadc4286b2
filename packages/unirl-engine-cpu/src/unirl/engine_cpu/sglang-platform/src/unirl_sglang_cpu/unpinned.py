"""Memory that is asked for as pinned is plain memory where there is no accelerator to pin it for.

SGLang's adapters (`sglang.srt.lora`) ask for pinned memory whatever the device, and offer no way to say otherwise:
torch then fails for want of an accelerator. The functions of torch that they ask through are wrapped here, in SGLang's
workers alone. Tried with SGLang 0.5.23 and torch 2.13; checks itself when it is put in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["let_memory_be_unpinned"]

FACTORIES = ("tensor", "empty", "zeros", "ones", "arange")
"""Functions of torch that SGLang's adapters call with `pin_memory=True`."""
_MARK = "_is_unpinned"


def let_memory_be_unpinned() -> None:
    """Put the wrappers in place, once. Raises RuntimeError where memory is pinned, or cannot be had, all the same."""
    for name in FACTORIES:
        made = getattr(torch, name)
        if not hasattr(made, _MARK):
            setattr(torch, name, _without_pinning(made))
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]
    made = torch.tensor([1, 2], dtype=torch.int32, device="cpu", pin_memory=True)
    if made.is_pinned() or made.pin_memory() is not made or made.tolist() != [1, 2]:
        raise RuntimeError(f"torch {torch.__version__} does not take what this platform for CPUs puts in its place.")


def _without_pinning(made: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(made)
    def plain(*arguments: Any, **settings: Any) -> torch.Tensor:
        settings.pop("pin_memory", None)
        return made(*arguments, **settings)

    setattr(plain, _MARK, True)
    return plain
