"""Frozen weights of a model's blocks in CPU memory, of which those of two blocks at a time are on the device.

torch and diffusers have no part that does this while adapters train. FSDP2's `CPUOffloadPolicy` copies on the stream
that computes where one rank has all weights, so nothing overlaps. `apply_group_offloading` of diffusers moves adapters
as well, puts back the values that they had before the last optimizer step, and does not bring weights for a backward
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from unirl.core.errors import RunFailed

from .pinned import pin

__all__ = ["OffloadedBlocks", "frozen_places"]

ALIGNMENT = 256
"""Bytes at which each weight begins, as CUDA's allocator gives them: kernels may read 16 at a time."""

Place = tuple[nn.Module, str]
"""The module that owns a parameter, and its name there."""


@dataclass(frozen=True, kw_only=True)
class _Weight:
    owner: nn.Module
    name: str
    start: int
    """First byte in the memory of its block."""
    host: nn.Parameter

    def put(self, param: nn.Parameter | None) -> None:
        """Replace it in its module. Its place among the parameters stays."""
        self.owner._parameters[self.name] = param


class OffloadedBlocks:
    """Copies the weights of each block to the device before its forward and before its backward pass, on a stream of
    its own, while the block before it computes.

    Blocks take two buffers of the device in turn, each block the same one every time: tensors that autograd has kept of
    a weight, such as its transpose, are views of that buffer, and hold the weight again when the block's backward pass
    begins. Where a block is not on the device its parameters are those in CPU memory, so that exports read them at any
    time, and an operation on them outside of the block's forward mixes devices, which torch refuses.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[nn.Module],
        *,
        device: torch.device,
        fill: Callable[[Mapping[str, Tensor]], None],
    ) -> None:
        """Take the frozen weights of these blocks to CPU memory, on a GPU to pinned memory.

        blocks: in the order in which they compute; in another one nothing overlaps. A block within another is part of
        it.  fill: sets tensors, by their names in the module, to the checkpoint's values; called for weights on the
        meta device, block by block. Raises RunFailed for memory that cannot be pinned.
        """
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        names = {part: name for name, part in module.named_modules()}
        self._hosts: list[Tensor] = []
        self._weights: list[list[_Weight]] = []
        for index, (block, places) in enumerate(frozen_places(module, blocks).items()):
            host, weights = _taken(places, names, fill)
            if self._stream is not None:
                pin(host, key="backend.offload_frozen", instead="none")
            self._hosts.append(host)
            self._weights.append(weights)
            block.register_forward_pre_hook(partial(self._before_forward, index))
            block.register_forward_hook(partial(self._after_forward, index), with_kwargs=True)
        self._sizes = [max((len(host) for host in self._hosts[slot::2]), default=0) for slot in (0, 1)]
        self._params: list[list[nn.Parameter]] = []
        """Parameters of each block on the device, views of the buffers; empty while there are none."""
        self._buffers: list[Tensor] = []
        self._held: list[int | None] = [None, None]
        """Block in each buffer."""
        self._arrived: list[torch.cuda.Event | None] = [None, None]
        self._current: int | None = None
        """The block that computes, or did last."""

    @contextmanager
    def set_aside(self) -> Generator[None]:
        """Within the block the module is without these weights, and the device without the buffers: what moves the
        module leaves them where they are."""
        for slot in (0, 1):
            self._put_back(slot)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._params, self._buffers, self._current = [], [], None
        for weight in self._all():
            weight.put(None)
        try:
            yield
        finally:
            for weight in self._all():
                weight.put(weight.host)

    def _all(self) -> Generator[_Weight]:
        for weights in self._weights:
            yield from weights

    def _before_forward(self, index: int, *_: Any) -> None:
        # Without gradients the next forward follows. With them it is the backward pass, which begins with the last two
        # blocks, and they are there.
        is_last = index + 1 == len(self._hosts)
        self._use(index, then=index + 1 if not is_last else None if torch.is_grad_enabled() else 0)

    def _after_forward(self, index: int, _: nn.Module, args: Any, kwargs: Any, output: object) -> None:
        if not torch.is_grad_enabled():
            return
        given, results = _with_gradient((args, kwargs)), _with_gradient(output)
        begun: list[None] = []

        def begin(_: Tensor) -> None:
            begun.append(None)
            self._use(index, then=index - 1 if index else None)

        def check(_: Tensor) -> None:
            # Such as after an operation in place on a view, which replaces the node that has the hook.
            if not begun:
                raise RunFailed(
                    f"backend.offload_frozen: the backward pass of block {index} began without its weights, because "
                    "its output was changed in place. Use none with this model, or clone the output."
                )

        # What passes through a block unchanged is the output of another one.
        for key in results.keys() - given.keys():
            # Before the first operation of the block's backward pass, and of its second forward where it is recomputed.
            results[key].register_hook(begin)
        for value in given.values():
            value.register_hook(check)

    def _use(self, index: int, *, then: int | None) -> None:
        """Have a block's weights in its module for the operations that follow on this stream, and begin to copy those
        of the block `then`, unless they would go over them."""
        if index == self._current:
            return
        if not self._buffers:
            self._allocate()
        self._copy(index)
        if (event := self._arrived[index % 2]) is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        for weight, param in zip(self._weights[index], self._params[index], strict=True):
            weight.put(param)
        self._current = index
        if then is not None and (then - index) % 2:
            self._copy(then)

    def _copy(self, index: int) -> None:
        """Begin to copy a block to its buffer, unless it is there."""
        slot = index % 2
        if self._held[slot] == index:
            return
        self._put_back(slot)
        host, buffer = self._hosts[index], self._buffers[slot]
        if self._stream is None:
            buffer[: len(host)].copy_(host)
        else:
            # Operations that read the buffer were all issued: those of the block that was in it.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                buffer[: len(host)].copy_(host, non_blocking=True)
                self._arrived[slot] = event = torch.cuda.Event()
                event.record(self._stream)
        self._held[slot] = index

    def _put_back(self, slot: int) -> None:
        held, self._held[slot] = self._held[slot], None
        for weight in self._weights[held] if held is not None else ():
            weight.put(weight.host)

    def _allocate(self) -> None:
        # Those of a rollout in inference mode could not be kept for a backward pass.
        with torch.inference_mode(False), torch.no_grad():
            self._buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in self._sizes]
            self._params = [
                [_view(self._buffers[index % 2], weight.start, like=weight.host) for weight in weights]
                for index, weights in enumerate(self._weights)
            ]


def frozen_places(module: nn.Module, blocks: Sequence[nn.Module]) -> dict[nn.Module, dict[nn.Parameter, Place]]:
    """The frozen weights of each block, and where they are, for blocks that are not within another one. Adapters are
    not among them, nor is a weight that is in several places of the module."""
    uses: dict[nn.Parameter, list[Place]] = {}
    for owner in module.modules():
        for name, param in owner.named_parameters(recurse=False, remove_duplicate=False):
            uses.setdefault(param, []).append((owner, name))
    inner = {part for block in blocks for part in block.modules() if part is not block}
    return {
        block: {
            param: uses[param][0]
            for name, param in block.named_parameters()
            if not param.requires_grad and ".lora_" not in f".{name}" and len(uses[param]) == 1
        }
        for block in blocks
        if block not in inner
    }


def _taken(
    places: Mapping[nn.Parameter, Place],
    names: Mapping[nn.Module, str],
    fill: Callable[[Mapping[str, Tensor]], None],
) -> tuple[Tensor, list[_Weight]]:
    """The memory of a block, [bytes], and its weights, which are there from now on."""
    starts: list[int] = []
    end = 0
    for param in places:
        starts.append(end)
        end += -(-param.nbytes // ALIGNMENT) * ALIGNMENT
    host = torch.empty(end, dtype=torch.uint8)
    weights: list[_Weight] = []
    empty: dict[str, Tensor] = {}
    for (param, (owner, name)), start in zip(places.items(), starts, strict=True):
        weight = _Weight(owner=owner, name=name, start=start, host=_view(host, start, like=param))
        if param.is_meta:
            empty[f"{names[owner]}.{name}".removeprefix(".")] = weight.host
        else:
            weight.host.data.copy_(param.data)
        weight.put(weight.host)
        weights.append(weight)
    if empty:
        fill(empty)
    return host, weights


def _with_gradient(values: object) -> dict[int, Tensor]:
    """Tensors that require a gradient, in arguments or results."""
    return {id(value): value for value in tree_leaves(values) if isinstance(value, Tensor) and value.requires_grad}


def _view(memory: Tensor, start: int, *, like: Tensor) -> nn.Parameter:
    """A parameter in this part of a memory. Its version counter is its own: a copy into the memory is no change of the
    weight that autograd would object to."""
    part = memory[start : start + like.nbytes].view(like.dtype).view(like.shape)
    return nn.Parameter(part.data, requires_grad=False)
