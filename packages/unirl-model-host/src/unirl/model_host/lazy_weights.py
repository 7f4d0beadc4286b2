"""Modules that are built without values, and filled from safetensors files once they are sharded.

A rank then never holds more of the module than its own shards and one piece that is being read.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from unirl.core.errors import RecipeError

from .model_files import contained_file, shard_names

__all__ = ["CheckpointValues", "Piece", "Pieces", "default_dtype", "empty_parameters", "stored_tensor", "weight_files"]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Generator[None]:
    """Within the block, torch's default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def empty_parameters(dtype: torch.dtype) -> Generator[None]:
    """Within the block the parameters of new modules are on the meta device, in `dtype` unless they say otherwise.

    Buffers get their values as always: rotary tables are in no checkpoint. Unlike accelerate's `init_empty_weights`
    this keeps tied parameters tied.
    """
    register = nn.Module.register_parameter

    def register_empty(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_empty
    try:
        with default_dtype(dtype):
            yield
    finally:
        nn.Module.register_parameter = register


def weight_files(folder: Path, stem: str, *, variant: str | None = None) -> list[Path]:
    """The safetensors files of a checkpoint: `<stem>.safetensors`, or those that its index names.

    variant: such as `fp16`, as diffusers puts it into the file names. Raises RecipeError when there is none, or one is
    not in the folder.
    """
    infix = f".{variant}" if variant else ""
    single = folder / f"{stem}{infix}.safetensors"
    index = folder / f"{stem}.safetensors.index{infix}.json"
    if single.is_file():
        return [contained_file(folder, single.name)]
    if index.is_file():
        return [contained_file(folder, name, named_by=index) for name in shard_names(index)]
    raise RecipeError(
        f"model.path: {str(folder)!r} has neither {single.name} nor {index.name}. Fetch the whole checkpoint, or check "
        "model.variant."
    )


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A tensor of a checkpoint, or a part of one, and the box of the module's tensor that it fills."""

    name: str
    """Name in the checkpoint. Its dims are the last ones of the box; the others have size 1."""
    start: tuple[int, ...]
    size: tuple[int, ...]
    source: tuple[int, ...] | None = None
    """Where the part starts in the stored tensor; None for all of it. The parts of a tensor cover it, each once."""

    def part(self, dims: int) -> tuple[slice, ...]:
        """The part of the stored tensor, which has `dims` dims."""
        sizes = self.size[len(self.size) - dims :]
        return tuple(slice(at, at + size) for at, size in zip(self.source or (0,) * dims, sizes, strict=True))


Pieces = Callable[[str, tuple[int, ...]], Sequence[Piece]]
"""The pieces of a tensor of the module, by its name and shape; empty where the checkpoint has it under that name."""


class CheckpointValues:
    """The values of a module's parameters and persistent buffers, in safetensors files."""

    def __init__(
        self,
        module: nn.Module,
        files: Sequence[Path],
        *,
        pieces: Pieces | None = None,
        renames: Mapping[str, str] | None = None,
    ) -> None:
        """module: as its library builds it, before anything wraps it; values are rounded to its dtypes, as they are
        when it is loaded whole.  pieces: where the checkpoint stores a tensor in parts.  renames: regular expressions
        that match the start of a name in the checkpoint -> its replacement in the module; the first that matches.

        Raises RecipeError when the files lack a tensor, have one that the module does not know or one of another shape.
        """
        self._files = tuple(files)
        self._stored = {
            _renamed(name, renames or {}): (file, name, shape) for file in files for name, shape in _shapes(file)
        }
        self._dtypes: dict[str, torch.dtype] = {}
        self._pieces: dict[str, Sequence[Piece]] = {}
        tied: dict[int, list[str]] = {}
        for name, tensor in module.state_dict(keep_vars=True).items():
            self._dtypes[name] = tensor.dtype
            self._pieces[name] = (pieces(name, tuple(tensor.shape)) if pieces else ()) or (_whole(name, tensor),)
            tied.setdefault(id(tensor), []).append(name)
        for names in tied.values():
            # A tied weight is stored under one of its names, or under each of them.
            stored = next((name for name in names if self._pieces[name][0].name in self._stored), names[0])
            self._pieces |= dict.fromkeys(names, self._pieces[stored])
        self._check(module, files[0].parent)

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Set these tensors, or this rank's shards of them, to the checkpoint's values. Not collective.

        tensors: parameters and persistent buffers by their names in the module, of any floating dtype.
        """
        done: set[int] = set()
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}
            for name, tensor in tensors.items():
                if id(tensor) in done:
                    continue
                done.add(id(tensor))
                local, start = _local(tensor)
                for piece in self._pieces[name]:
                    file, stored, _ = self._stored[piece.name]
                    if file not in opened:
                        opened[file] = stack.enter_context(_opened(file))
                    _read(opened[file], piece, stored, into=local, start=start, dtype=self._dtypes[name])

    @torch.no_grad()
    def save(self, folder: Path, tensors: Mapping[str, Tensor], *, others: Sequence[str] = ()) -> None:
        """Write the checkpoint's files with the values of these tensors, in their dtypes, and all else as it is stored.

        tensors: whole ones by their names in the module. One file at a time is in memory.
        others: names of further files beside them, which are copied.
        """
        parts: dict[Path, dict[str, list[tuple[Piece, Tensor]]]] = {file: {} for file in self._files}
        for name, tensor in tensors.items():
            # Of tied weights, each that is stored.
            pieces = (_whole(name, tensor),) if name in self._stored else self._pieces[name]
            for piece in pieces:
                file, stored, _ = self._stored[piece.name]
                parts[file].setdefault(stored, []).append((piece, tensor))
        dims = {(file, stored): len(shape) for file, stored, shape in self._stored.values()}
        for file, filled in parts.items():
            values = {name: stored_tensor(own, dims=dims[file, name]) for name, own in filled.items()}
            with _opened(file) as opened:
                rest = {name: opened.get_tensor(name) for name in opened.keys() if name not in values}  # noqa: SIM118
            save_file(values | rest, folder / file.name, metadata={"format": "pt"})
        base = self._files[0].parent
        for file in (*base.glob("*.safetensors.index*.json"), *(base / name for name in others)):
            shutil.copyfile(file, folder / file.name)

    def _check(self, module: nn.Module, folder: Path) -> None:
        pieces: dict[str, list[Piece]] = {}
        # Tied parameters have the same pieces.
        for piece in {id(piece): piece for parts in self._pieces.values() for piece in parts}.values():
            pieces.setdefault(piece.name, []).append(piece)
        # Tensors that older versions of the library wrote.
        ignored: Sequence[str] = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
        missing = sorted(pieces.keys() - self._stored.keys())
        extra = sorted(
            name
            for name in self._stored.keys() - pieces.keys() - self._pieces.keys()
            if not any(re.search(pattern, name) for pattern in ignored)
        )
        where = f"model.path: the weights in {str(folder)!r}"
        if missing:
            raise RecipeError(f"{where} lack {_some(missing)}. Fetch the whole checkpoint.")
        if extra:
            raise RecipeError(
                f"{where} have {_some(extra)}, which {type(module).__name__} with the settings of config.json does not "
                "have. Fetch the checkpoint again, its config.json included."
            )
        for name, parts in pieces.items():
            shape = self._stored[name][2]
            # A piece of more dims than the stored tensor begins with dims of size 1.
            dims = min(len(shape), *(len(piece.size) for piece in parts))
            ends = [[end.stop for end in piece.part(dims)] for piece in parts]
            if shape != (expected := tuple(map(max, zip(*ends, strict=True)))):
                raise RecipeError(
                    f"{where} have {name!r} as {list(shape)}, expected {list(expected)} by config.json. Fetch the "
                    "checkpoint again."
                )


def _whole(name: str, tensor: Tensor) -> Piece:
    return Piece(name=name, start=(0,) * tensor.ndim, size=tuple(tensor.shape))


def stored_tensor(parts: Sequence[tuple[Piece, Tensor]], *, dims: int) -> Tensor:
    """The tensor of a checkpoint, of so many dims, whose pieces lie in these tensors of a module."""
    ends = [[end.stop for end in piece.part(dims)] for piece, _ in parts]
    result = parts[0][1].new_empty([max(own) for own in zip(*ends, strict=True)])
    for piece, tensor in parts:
        box = tuple(slice(at, at + size) for at, size in zip(piece.start, piece.size, strict=True))
        part = result[piece.part(dims)]
        part.copy_(tensor[box].reshape(part.shape))
    return result


def _renamed(name: str, renames: Mapping[str, str]) -> str:
    for pattern, start in renames.items():
        if found := re.match(pattern, name):
            return start + name[found.end() :]
    return name


def _shapes(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    try:
        with _opened(file) as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                yield name, tuple(opened.get_slice(name).get_shape())
    except (OSError, SafetensorError) as error:
        raise RecipeError(f"model.path: {str(file)!r} cannot be read: {error} Fetch it again.") from error


def _opened(file: Path) -> Any:
    """safetensors has no types."""
    return safe_open(file, framework="pt")


def _local(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's shard, and where it starts in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.ndim
    shard = tensor.to_local()
    if not shard.numel():
        return shard, (0,) * tensor.ndim
    # DCP's own interface to tensors that are sharded.
    chunks = cast("Any", tensor).__create_chunk_list__()
    return shard, tuple(chunks[0].offsets)


def _read(file: Any, piece: Piece, name: str, *, into: Tensor, start: tuple[int, ...], dtype: torch.dtype) -> None:
    """Copy the part of a piece, of this name in the file, that lies in the shard `into`, which starts at `start` of the
    whole tensor."""
    ends = [begin + size for begin, size in zip(piece.start, piece.size, strict=True)]
    first = [max(a, b) for a, b in zip(piece.start, start, strict=True)]
    last = [min(end, begin + size) for end, begin, size in zip(ends, start, into.shape, strict=True)]
    if any(low >= high for low, high in zip(first, last, strict=True)):
        return
    here = tuple(slice(low - begin, high - begin) for low, high, begin in zip(first, last, start, strict=True))
    stored = file.get_slice(name)
    num_dims = len(stored.get_shape())
    offsets = zip(first, last, piece.start, strict=True)
    within = [(low - begin, high - begin) for low, high, begin in offsets][len(first) - num_dims :]
    there = tuple(
        slice(part.start + low, part.start + high)
        for (low, high), part in zip(within, piece.part(num_dims), strict=True)
    )
    values: Tensor = stored[there] if num_dims else file.get_tensor(name)
    into[here].copy_(values.to(dtype).view(into[here].shape))


def _some(names: Sequence[str]) -> str:
    return f"{names[0]!r}{f' and {len(names) - 1} more' if names[1:] else ''}"
