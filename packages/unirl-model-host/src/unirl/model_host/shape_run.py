"""Forward passes that compute shapes alone: what they keep for the backward pass, and how many operations they are.

The modules need no values and no memory, so that a model of any size can be measured in seconds on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

__all__ = ["ForwardSize", "shapes_only"]

_INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)
_SDPA_ON_CPU: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # pyright: ignore[reportPrivateUsage]


@dataclass(kw_only=True)
class ForwardSize:
    """Cost of the forward passes in a `shapes_only` block. Sizes are in bytes; each storage counts once."""

    flops: int = 0
    """Floating-point operations, a multiplication and an addition being two."""
    saved: dict[int, int] = field(default_factory=lambda: dict[int, int]())
    """Storage -> bytes kept for the backward pass. Parameters and buffers are not among them."""
    blocks: list[dict[int, int]] = field(default_factory=lambda: list[dict[int, int]]())
    """Storage -> bytes kept by each call of a block."""
    inputs: dict[int, int] = field(default_factory=lambda: dict[int, int]())
    """Storage -> bytes of the inputs of blocks, kept where blocks are recomputed."""
    unpacked: list[dict[int, int]] = field(default_factory=lambda: list[dict[int, int]]())
    """Storage -> bytes of the weights that each call of a block keeps of those made in it. They are not in `saved`:
    they are as large for any number of rows."""
    _alive: list[Any] = field(default_factory=lambda: list[Any]())
    """A storage that is freed would lend its number to another one."""

    @property
    def saved_bytes(self) -> int:
        return sum(self.saved.values())

    @property
    def kept_bytes(self) -> int:
        """Bytes kept with recomputed blocks: everything outside of them, and their inputs."""
        inside = {number for block in self.blocks for number in block}
        outside = {number: size for number, size in self.saved.items() if number not in inside}
        return sum((outside | self.inputs).values())

    @property
    def block_bytes(self) -> int:
        """The most that one block keeps besides its inputs."""
        sizes = [sum(size for key, size in block.items() if key not in self.inputs) for block in self.blocks]
        return max(sizes, default=0)

    @property
    def unpacked_bytes(self) -> int:
        """The most weights that one block keeps of those made in it."""
        return max((sum(block.values()) for block in self.unpacked), default=0)

    def observe(self, tensor: Tensor, into: dict[int, int]) -> None:
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        into[_number(tensor)] = storage.nbytes()


@contextmanager
def shapes_only(
    modules: Iterable[nn.Module],
    *,
    blocks: Sequence[nn.Module] = (),
    adapted: Mapping[nn.Module, int] | None = None,
    unpacked: Iterable[nn.Module] = (),
    dtype: torch.dtype | None = None,
) -> Generator[ForwardSize]:
    """Within the block, calls of these modules compute shapes: zeros come out. Values that go in count where
    shapes depend on them and on no weight, as the lengths in a mask.

    Parameters may be on the meta device. They, and their gradients, are as they are outside: what requires none keeps
    nothing.  blocks: submodules whose activations may be computed again.  adapted: linear layer -> rank of a LoRA
    adapter in fp32, which alone trains.  unpacked: frozen linear layers in blocks whose weight is made anew from int8
    in each call, in the dtype that it computes in, and kept for the backward pass.  dtype: of all floating parameters
    in place of their own, adapters included.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    size = ForwardSize()
    own: set[int] = set()
    made: dict[int, int] = {}
    inside: list[dict[int, int]] = []

    def packed(tensor: Tensor) -> Tensor:
        if _number(tensor) in made:
            size.observe(tensor, size.unpacked[-1])
        elif _number(tensor) not in own:
            size.observe(tensor, size.saved)
            if inside:
                size.observe(tensor, inside[-1])
        return tensor

    def entered(_: nn.Module, args: Any, kwargs: Any) -> None:
        for value in tree_leaves((args, kwargs)):
            # Tables that all blocks share are computed once, and small.
            if isinstance(value, Tensor) and _number(value) not in own:
                size.observe(value, size.inputs)
        inside.append({})
        size.unpacked.append({})

    def left(*_: Any) -> None:
        size.blocks.append(inside.pop())

    with ExitStack() as undo:
        for module in modules:
            undo.callback(_restore, [(held, dict(held)) for held in _tensors(module)])
            _make_fake(module, mode, own, dtype=dtype, frozen=bool(adapted))
            undo.callback(_put_back, module, dict(vars(module)))
            module.forward = _on_shapes(module.forward, size, packed)
        for layer in unpacked:
            undo.callback(_put_back, layer, dict(vars(layer)))
            layer.forward = _unpacked(cast(nn.Linear, layer), size, made)
        for layer, rank in (adapted or {}).items():
            undo.callback(_put_back, layer, dict(vars(layer)))
            layer.forward = _adapted(cast(nn.Linear, layer), rank, mode, own, dtype=dtype or torch.float32)
        for block in blocks:
            undo.callback(block.register_forward_pre_hook(entered, with_kwargs=True).remove)
            undo.callback(block.register_forward_hook(left).remove)
        yield size


class _RowsOfMasks(TorchDispatchMode):
    """Indexing a shape by a mask with values: by the places that it selects, whose number is a shape."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in _INDEXING:
            places: list[Any] = []
            for index in args[1]:
                is_mask = isinstance(index, Tensor) and index.dtype is torch.bool and not isinstance(index, FakeTensor)
                places += index.nonzero().unbind(1) if is_mask else [index]
            args = (args[0], places, *args[2:])
        return func(*args, **(kwargs or {}))


def _on_shapes(
    forward: Callable[..., Any], size: ForwardSize, packed: Callable[[Tensor], Tensor]
) -> Callable[..., Any]:
    """Operations on weights, and on results of such, compute shapes. Others have values, such as lengths that are read
    from a mask."""

    def called(*args: Any, **kwargs: Any) -> Any:
        counter = FlopCounterMode(display=False, custom_mapping={_SDPA_ON_CPU: _attention_flops})
        with _RowsOfMasks(), counter, torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor):
            result = forward(*args, **kwargs)
        size.flops += counter.get_total_flops()
        return tree_map(_zeros, result)

    return called


def _adapted(
    layer: nn.Linear, rank: int, mode: FakeTensorMode, own: set[int], *, dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    """The layer with an adapter, as peft computes it."""
    with mode:
        a = nn.Parameter(torch.empty(rank, layer.in_features, dtype=dtype))
        b = nn.Parameter(torch.empty(layer.out_features, rank, dtype=dtype))
    own |= {_number(a), _number(b)}
    plain = layer.forward

    def forward(x: Tensor) -> Tensor:
        result = plain(x)
        delta = nn.functional.linear(nn.functional.linear(x.to(dtype), a), b)
        return (result + delta * 2.0).to(result.dtype)

    return forward


def _unpacked(layer: nn.Linear, size: ForwardSize, made: dict[int, int]) -> Callable[[Tensor], Tensor]:
    """The layer with a weight in int8, as torchao computes it."""

    def forward(x: Tensor) -> Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        weight = torch.empty_like(layer.weight, dtype=dtype)
        size.observe(weight, made)
        return nn.functional.linear(x, weight, layer.bias).to(x.dtype)

    return forward


def _make_fake(
    module: nn.Module, mode: FakeTensorMode, own: set[int], *, dtype: torch.dtype | None, frozen: bool
) -> None:
    known: dict[int, nn.Parameter] = {}
    part: Any
    for part in module.modules():
        for name, param in part._parameters.items():
            if param is None:
                continue
            if id(param) not in known:
                wanted = dtype if dtype is not None and param.is_floating_point() else param.dtype
                with mode:
                    fake = nn.Parameter(
                        torch.empty(param.shape, dtype=wanted), requires_grad=param.requires_grad and not frozen
                    )
                known[id(param)] = fake
                own.add(_number(fake))
            part._parameters[name] = known[id(param)]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                with mode:
                    part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
                own.add(_number(part._buffers[name]))


def _put_back(module: nn.Module, before: dict[str, Any]) -> None:
    """Restore its `forward`, which may have been set on the instance."""
    vars(module).pop("forward")
    if "forward" in before:
        module.forward = before["forward"]


def _tensors(module: nn.Module) -> Generator[dict[str, Any]]:
    part: Any
    for part in module.modules():
        yield part._parameters
        yield part._buffers


def _restore(held: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for now, before in held:
        now.update(before)


def _number(tensor: Any) -> int:
    """The same for tensors that share their memory."""
    return tensor.untyped_storage()._cdata


def _zeros(value: Any) -> Any:
    return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, Tensor) else value


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Operations for shapes [B, heads, tokens, width]: queries x keys, and that x values. torch counts only on GPUs."""
    batch, heads, tokens, width = query
    return 2 * batch * heads * tokens * key[-2] * (width + value[-1])
