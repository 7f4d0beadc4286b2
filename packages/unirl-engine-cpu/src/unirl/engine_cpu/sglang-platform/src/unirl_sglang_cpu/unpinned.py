"""Makes requests for pinned memory return plain memory on machines without an accelerator.

SGLang's LoRA code (`sglang.srt.lora`) requests pinned memory on every device, without a setting to turn it off, and
torch then fails without an accelerator. The torch functions it uses are wrapped here, only in SGLang's workers. Tested
with SGLang 0.5.23 and torch 2.13; verified when installed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["let_memory_be_unpinned"]

FACTORIES = ("tensor", "empty", "zeros", "ones", "arange")
"""Functions of torch that SGLang's LoRA code calls with `pin_memory=True`."""
_MARK = "_is_unpinned"


def let_memory_be_unpinned() -> None:
    """Install the wrappers, once. Raises RuntimeError if memory is still pinned or cannot be allocated."""
    for name in FACTORIES:
        made = getattr(torch, name)
        if not hasattr(made, _MARK):
            setattr(torch, name, _without_pinning(made))
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]
    made = torch.tensor([1, 2], dtype=torch.int32, device="cpu", pin_memory=True)
    if made.is_pinned() or made.pin_memory() is not made or made.tolist() != [1, 2]:
        raise RuntimeError(f"torch {torch.__version__} ignores the replacement for pinned memory of this CPU platform.")


def _without_pinning(made: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(made)
    def plain(*arguments: Any, **settings: Any) -> torch.Tensor:
        settings.pop("pin_memory", None)
        return made(*arguments, **settings)

    setattr(plain, _MARK, True)
    return plain
