"""CPU support for SGLang's image and video pipelines: operations in PyTorch, and a sleep that needs no GPU.

SGLang finds it through its entry points `sglang.multimodal_gen.plugins`. Its hook registry imports the replaced
functions, and reports those that it cannot import.
"""

# SGLang is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["register"]

NORMS = "sglang.multimodal_gen.runtime.layers.layernorm"
OCCUPATION = (
    "sglang.multimodal_gen.runtime.managers.memory_managers.memory_occupation_controller.MemoryOccupationController"
)


def register() -> None:
    """Called by SGLang once in each of its processes. Does nothing on a machine with a GPU."""
    import torch

    if torch.cuda.is_available():
        return
    from sglang.kernels.ops.diffusion.common.fallback_torch import fuse_scale_shift_kernel_native
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType

    # SGLang's own CPU platform calls compiled operations; the layers also have them in PyTorch.
    for layer in ("_NormScaleShift", "_ScaleResidualNormScaleShift"):
        HookRegistry.register(f"{NORMS}.{layer}.forward_cpu", _native, HookType.REPLACE)
    fused = "sglang.kernels.ops.diffusion.modulate.scale_shift_triton.fuse_scale_shift_kernel"
    HookRegistry.register(fused, fuse_scale_shift_kernel_native, HookType.REPLACE)
    # Sleep moves modules to the CPU, where they already are, but still synchronises with CUDA.
    HookRegistry.register(f"{OCCUPATION}._move_modules", _moved, HookType.AROUND)
    HookRegistry.register(f"{OCCUPATION}._clear_torch_device_cache", _nothing, HookType.REPLACE)


def _native(layer: Any, *arguments: Any, **named: Any) -> Any:
    return layer.forward_native(*arguments, **named)


def _moved(stock: Callable[..., None], controller: Any, names: Sequence[str], device: str) -> None:
    if names:
        stock(controller, names, device)


def _nothing() -> None:
    """torch does not cache host memory."""
