"""A pretended accelerator: tensors of the device `pretend`, computed on the CPU, which keep the rules that CUDA has.

An operation that mixes them with tensors of the CPU raises `DeviceMismatch`, with the operation and the place in
UniRL's code. Each time the host waits for the device is counted, and each copy between the two. Left out are streams,
kernels, the numbers of random generators, checkpoints and collectives.

torch registers a backend once per process and cannot undo it: `torch.accelerator` finds one from then on, and gradients
on it fail where any were computed before. Use it in a process of its own, such as one of `own_process`.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import Library, fallthrough_kernel
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

__all__ = ["NAME", "DeviceMismatch", "Event", "PretendedDevice", "own_process", "pretended_device"]

NAME = "pretend"
aten = torch.ops.aten

_INDEXING = {aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default, aten.index_put_.default}
_INDEXING |= {aten._unsafe_index_put.default, aten._index_put_impl_.default}
_WAITS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default}
# The shape of their result depends on values.
_WAITS |= {aten._unique2.default, aten.unique_dim.default, aten.repeat_interleave.Tensor, aten.bincount.default}
_TAKES_A_NUMBER = {aten.fill_.Tensor, aten.masked_fill.Tensor, aten.masked_fill_.Tensor, aten._foreach_mul_.Tensor}
_AUTOCAST = "AutocastPrivateUse1"
_LOWERED = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv2d", "conv3d", "scaled_dot_product_attention")
_CPU = torch.device("cpu")


class DeviceMismatch(RuntimeError):
    """An operation on tensors of both devices, which CUDA refuses as well."""


class Event(NamedTuple):
    """Something that happens between the host and the device."""

    what: str
    """The operation that the host waits in; `h2d` or `d2h` for a transfer."""
    place: str
    """File and line of the innermost frame of UniRL's code, such as `numerics/train/stack.py:284`."""


class PretendedDevice:
    """Counts of what was done on the device inside `pretended_device`."""

    name = NAME

    def __init__(self) -> None:
        self.syncs = Counter[Event]()
        """How often the host waited: it read a value, copied to the CPU, or brought an index from there."""
        self.transfers = Counter[Event]()
        """Bytes that were copied, `h2d` and `d2h`."""

    def num_syncs(self) -> int:
        return self.syncs.total()

    def num_bytes(self, what: str) -> int:
        """Bytes of all transfers in a direction."""
        return sum(size for event, size in self.transfers.items() if event.what == what)

    def _waits(self, what: str) -> None:
        self.syncs[Event(what, _place())] += 1

    def _moves(self, what: str, tensor: Tensor) -> None:
        self.transfers[Event(what, _place())] += tensor.nbytes


_counts: list[PretendedDevice] = []
"""That of the block that runs now. A thread of torch computes gradients, so it cannot be a context variable."""
_generators: set[int] = set()
"""Those of the device, by `_cdata`."""


@contextmanager
def own_process() -> Generator[ProcessPoolExecutor]:
    """A new process, in which functions of modules run: `process.submit(function, *args).result()`."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        yield process


@contextmanager
def pretended_device() -> Generator[PretendedDevice]:
    """Within the block, `torch.device("pretend")` is a device, and what happens on it is counted."""
    _register()
    device, own = PretendedDevice(), {name: getattr(torch, name) for name in ("tensor", "as_tensor", "Generator")}
    # It remembers the functions that it finds at its first call, and must not remember those below.
    _device_constructors()
    _counts.append(device)
    torch.tensor, torch.as_tensor = _made_on_device(torch.tensor), _made_on_device(torch.as_tensor)
    torch.Generator = _Generator  # type: ignore[misc]
    try:
        with _Factories():
            yield device
    finally:
        for name, value in own.items():
            setattr(torch, name, value)
        _counts.pop()


class _Module(_DummyBackendModule):
    """What torch looks for under `torch.pretend`."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    def current_stream(self, device: Any = None) -> None: ...
    def synchronize(self, device: Any = None) -> None: ...

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.zeros(0, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None: ...


@cache
def _register() -> tuple[Library, Library]:
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    others, library = Library("_", "IMPL", _AUTOCAST), Library("aten", "IMPL", _AUTOCAST)
    others.fallback(fallthrough_kernel)
    for name in _LOWERED:
        library.impl(name, _lowered(getattr(aten, name)), _AUTOCAST)
    # Registrations end with their library.
    return others, library


def _lowered(operation: Any) -> Any:
    """An operation that autocast computes in its dtype."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(torch.get_autocast_dtype(NAME)) if tensor.is_floating_point() else tensor

    def run(*args: Any, **kwargs: Any) -> Any:
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _AUTOCAST))
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return operation(*_mapped(cast, args), **{name: _mapped(cast, value) for name, value in kwargs.items()})

    return run


def _made_on_device(make: Any) -> Any:
    """`torch.tensor` or `torch.as_tensor`, which allocate below the dispatcher. They make the tensor on the CPU first,
    as for CUDA."""

    def made(data: Any, *, device: Any = None, requires_grad: bool = False, **options: Any) -> Tensor:
        if not _is_ours(device) or isinstance(data, _Tensor):
            kept = {"requires_grad": True} if requires_grad else {}
            return make(data, device=device, **options, **kept)
        # CUDA reads numbers of its own one by one, too.
        numbers = _mapped(lambda tensor: tensor.item(), data) if isinstance(data, (list, tuple)) else data
        return make(numbers, **options).to(device).requires_grad_(requires_grad)

    return made


class _Generator(torch.Generator):
    """A random generator that says it is of the device; its numbers are those of the CPU."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        self = super().__new__(cls)
        self._device = torch.device(device)
        # An operation gets another object of the same generator.
        (_generators.add if _is_ours(device) else _generators.discard)(self._cdata)
        return self

    def __init__(self, device: Any = "cpu") -> None: ...

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device


class _Tensor(Tensor):
    """A tensor of the device: the shape of one, and its values in `inner`, a tensor of the CPU."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor) -> _Tensor:
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )
        self.inner = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{NAME}({self.inner!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a tensor of the pretended device cannot be pickled; move it to the CPU")

    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__(_on_device(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_on_device(index), value)

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: _Tensor) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.inner = value.inner

    def new_tensor(self, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device, requires_grad=requires_grad)

    def tolist(self) -> Any:
        return self.cpu().tolist()


class _Factories(TorchDispatchMode):
    """Sees the operations whose only sign of the device is an argument."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():
            # There, operations arrive that are made of others.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if _is_ours(kwargs.get("device")) or any(isinstance(tensor, _Tensor) for tensor in _tensors(args, kwargs)):
            return _run(func, args, kwargs)
        return func(*args, **kwargs)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation that reads or makes a tensor of the device."""
    if torch.Tag.inplace_view in func.tags:
        raise NotImplementedError(f"{func}: the pretended device changes no shapes in place")
    tensors = list(_tensors(args, kwargs))
    device = kwargs.get("device")
    makes = any(isinstance(tensor, _Tensor) for tensor in tensors) if device is None else _is_ours(device)
    if func is aten._to_copy.default:
        _count_copy(args[0], to_device=makes)
    elif func is aten.copy_.default:
        _count_copy(args[1], to_device=isinstance(args[0], _Tensor))
    elif func in _INDEXING:
        _check_index(func, *args)
    else:
        _check_devices(func, tensors, kwargs, makes=makes)
    if func in _WAITS:
        _counts[-1]._waits(str(func))
    if makes and device is not None:
        kwargs = {**kwargs, "device": _CPU, "pin_memory": None}
    inner = _mapped(_inner, args)
    if func is aten.histc.default and not inner[0].is_floating_point():
        # CUDA counts integers too; the CPU does not.
        inner = (inner[0].double(), *inner[1:])
    if func is aten._upsample_bilinear2d_aa.default and inner[0].dtype in (torch.bfloat16, torch.float16):
        # CUDA has it in 16 bits, and computes in fp32; the CPU has it in fp32 alone.
        rounded = func(inner[0].float(), *inner[1:]).to(inner[0].dtype)
        return _mapped(_outer, rounded)
    result = func(*inner, **{name: _mapped(_inner, value) for name, value in kwargs.items()})
    returns = func._schema.returns
    if returns and returns[0].alias_info is not None and returns[0].alias_info.is_write:
        return kwargs.get("out", args[0])
    return _mapped(_outer, result) if makes else result


def _tensors(*values: Any) -> Iterator[Tensor]:
    """Tensors of an operation's arguments. torch's own pytrees take longer than most operations of a miniature."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(*value)
        elif isinstance(value, dict):
            yield from _tensors(*value.values())


def _mapped(change: Callable[[Tensor], Any], value: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    return type(value)(_mapped(change, item) for item in value) if type(value) in (tuple, list) else value


def _inner(tensor: Tensor) -> Tensor:
    return tensor.inner if isinstance(tensor, _Tensor) else tensor


def _outer(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, _Tensor) else _Tensor(tensor)


def _count_copy(source: Tensor, *, to_device: bool) -> None:
    if isinstance(source, _Tensor) and not to_device:
        _counts[-1]._moves("d2h", source)
        _counts[-1]._waits("copy to the CPU")
    elif to_device and not isinstance(source, _Tensor):
        _counts[-1]._moves("h2d", source)


def _check_index(func: Any, source: Tensor, indices: Sequence[Tensor | None], values: Any = None, *_: Any) -> None:
    """An index of the CPU may go into a tensor of the device, and is copied; the other way round raises."""
    given = [index for index in indices if index is not None]
    is_ours = isinstance(source, _Tensor)
    if not is_ours and any(isinstance(index, _Tensor) for index in given):
        raise DeviceMismatch(f"{func}: an index of the device into a tensor of the CPU, at {_place()}")
    if isinstance(values, Tensor) and isinstance(values, _Tensor) != is_ours and (values.ndim or not is_ours):
        raise DeviceMismatch(f"{func}: values of another device than the tensor that they go into, at {_place()}")
    for index in given:
        if is_ours and not isinstance(index, _Tensor):
            _counts[-1]._moves("h2d", index)
            _counts[-1]._waits("index from the CPU")
        if is_ours and index.dtype in (torch.bool, torch.uint8):
            _counts[-1]._waits("boolean index")


def _check_devices(func: Any, tensors: Sequence[Tensor], kwargs: dict[str, Any], *, makes: bool) -> None:
    """Tensors of one device; a number of the CPU may take part in an operation element by element."""
    generator = kwargs.get("generator")
    if makes and generator is not None and generator._cdata not in _generators:
        raise DeviceMismatch(f"{func}: a random generator of the CPU for a tensor of the device, at {_place()}")
    if not any(isinstance(tensor, _Tensor) for tensor in tensors):
        return
    is_elementwise = torch.Tag.pointwise in func.tags or func in _TAKES_A_NUMBER
    for other in (tensor for tensor in tensors if not isinstance(tensor, _Tensor)):
        if other.ndim or not is_elementwise:
            kind = f"{str(other.dtype).removeprefix('torch.')}{list(other.shape)}"
            raise DeviceMismatch(f"{func}: tensors of the device with {kind} of the CPU, at {_place()}")


def _is_ours(device: Any) -> bool:
    return device is not None and (device if isinstance(device, torch.device) else torch.device(device)).type == NAME


def _on_device(index: Any) -> Any:
    """An index in which lists of numbers, which torch would put below the dispatcher, are tensors of the device."""
    if isinstance(index, tuple):
        return tuple(_on_device(part) for part in index)
    return torch.tensor(list(index), device=NAME) if isinstance(index, (list, range)) else index


def _place() -> str:
    """File and line of the innermost frame of the product, else of a file that is not torch's."""
    frame, outside = sys._getframe(1), ""
    while frame is not None:
        name = frame.f_code.co_filename
        if "/src/unirl/" in name:
            return f"{name.rpartition('/src/unirl/')[2]}:{frame.f_lineno}"
        if not outside and name != __file__ and "/torch/" not in name:
            outside = f"{name.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return outside
