"""The first layer whose output is not finite, for the error about a forward that gave NaN or infinity."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["first_not_finite"]


class _Found(Exception):
    """Ends the forward at the first layer."""


@torch.no_grad()
def first_not_finite(module: nn.Module, run: Callable[[], object]) -> str:
    """Which layer's output is not finite first, and what to do, as the end of a sentence.

    run: calls the module once more as it was called when the values were found. Not called for a module whose weights
    are shared with other ranks, which do not call theirs: its own weights are searched instead.
    """
    named = cast("Iterable[tuple[str, nn.Module]]", module.named_modules())
    place: list[tuple[str, nn.Module, bool]] = []

    def hook(name: str) -> Callable[[nn.Module, Any, Any, object], None]:
        def check(part: nn.Module, args: Any, kwargs: Any, output: object) -> None:
            if not all(_is_finite(tensor) for tensor in _tensors(output)):
                # Infinity may be a mask.
                place.append((name, part, any(bool(tensor.isnan().any()) for tensor in _tensors([args, kwargs]))))
                raise _Found

        return check

    if not any(isinstance(weight, DTensor) and weight.device_mesh.size() > 1 for weight in module.parameters()):
        handles = [part.register_forward_hook(hook(name), with_kwargs=True) for name, part in named]
        try:
            run()
        except _Found:
            pass
        finally:
            for handle in handles:
                handle.remove()
    name, part, is_given = place[0] if place else ("", module, False)
    bad = _not_finite(part)
    weight = f"{name}.{bad}" if name else bad
    # A layer may compute with the weight of one below it.
    owner = module.get_submodule(weight.rpartition(".")[0]) if bad else part
    layer = weight.rpartition(".")[0] if bad else name
    where = f", first at layer {layer!r} ({type(owner).__name__})" if place and layer else ""
    resume = "if training made it so, resume from an earlier step with a lower backend.lr."
    if bad:
        return f"{where}: the weight {weight!r} is not finite. Use another checkpoint; {resume}"
    if is_given:
        return (
            f"{where}: it is given NaN. Check the weights and the dtype of the parts before it, such as text encoders."
        )
    return f"{where}: its weights are finite, and its output overflows. Use bfloat16 or float32, not float16; {resume}"


def _not_finite(module: nn.Module) -> str:
    """Name of the first parameter or buffer that is not finite; empty where all are."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return next((name for name, tensor in tensors if not _is_finite(tensor)), "")


def _is_finite(tensor: Tensor) -> bool:
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if is_traceable_wrapper_subclass(own):
        # Such as a quantized weight: codes and scales.
        return all(_is_finite(getattr(own, name)) for name in own.__tensor_flatten__()[0])
    return own.is_meta or bool(own.isfinite().all())


def _tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict | list | tuple):
        several = cast("Any", output)
        for item in several.values() if isinstance(output, dict) else several:
            yield from _tensors(item)
