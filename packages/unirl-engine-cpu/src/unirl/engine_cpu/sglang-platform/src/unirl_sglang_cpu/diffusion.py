"""What SGLang's pipelines for images and videos need on a CPU: operations in PyTorch, and a sleep that asks for no GPU.

SGLang finds it through its entry points `sglang.multimodal_gen.plugins`. Its hook registry imports what is replaced,
and says so where it cannot.
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
    """What SGLang calls once in each of its processes: nothing where there is a GPU."""
    import torch

    if torch.cuda.is_available():
        return
    from sglang.kernels.ops.diffusion.common.fallback_torch import fuse_scale_shift_kernel_native
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType

    # SGLang's own platform for CPUs calls compiled operations; the layers have them in PyTorch as well.
    for layer in ("_NormScaleShift", "_ScaleResidualNormScaleShift"):
        HookRegistry.register(f"{NORMS}.{layer}.forward_cpu", _native, HookType.REPLACE)
    fused = "sglang.kernels.ops.diffusion.modulate.scale_shift_triton.fuse_scale_shift_kernel"
    HookRegistry.register(fused, fuse_scale_shift_kernel_native, HookType.REPLACE)
    # Asleep, modules are moved to the CPU, where they are; CUDA is waited for all the same.
    HookRegistry.register(f"{OCCUPATION}._move_modules", _moved, HookType.AROUND)
    HookRegistry.register(f"{OCCUPATION}._clear_torch_device_cache", _nothing, HookType.REPLACE)


def _native(layer: Any, *arguments: Any, **named: Any) -> Any:
    return layer.forward_native(*arguments, **named)


def _moved(stock: Callable[..., None], controller: Any, names: Sequence[str], device: str) -> None:
    if names:
        stock(controller, names, device)


def _nothing() -> None:
    """torch keeps no cache of the host's memory."""
