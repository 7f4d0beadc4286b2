"""Weight updates for an engine: compatibility checks, and the files that carry them."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from unirl.core.errors import RunFailed
from unirl.core.names import did_you_mean
from unirl.core.roles import WeightUpdate
from unirl.core.types.weights import forms, weight_mismatch

__all__ = ["Held", "adapter_mismatch", "described", "files_of", "full_mismatch", "inventory", "place_for"]

FILE_BYTES = 2**30
"""Maximum file size in bytes, unless one tensor is larger."""
SHARED_MEMORY = Path("/dev/shm")
PREFIX = "unirl-weights-"
LOCK = "lock"
"""File in a folder of shared memory that its process holds a lock on."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """A weight of an engine."""

    dtype: str
    shape: tuple[int, ...]


def inventory(found: Sequence[Sequence[Any]]) -> dict[str, Held]:
    """The weights reported by the server, by name."""
    return {name: Held(dtype=dtype, shape=tuple(shape)) for name, dtype, shape in found}


def described(tensor: Tensor) -> Held:
    """A weight by its dtype and shape."""
    return Held(dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))


def full_mismatch(update: WeightUpdate, held: Mapping[str, Held], *, rounds: bool) -> str:
    """Why full weights are incompatible; empty when they fit. rounds: fp32 weights are rounded to the engine's
    dtype."""
    sent = {name: described(form) for name, form in forms(update.tensors).items()}
    if rounds:
        sent = {
            name: Held(dtype=held[name].dtype, shape=one.shape) if one.dtype == "float32" and name in held else one
            for name, one in sent.items()
        }
    return weight_mismatch(sent, held)


def adapter_mismatch(update: WeightUpdate, held: Mapping[str, Held], *, most_rank: int) -> str:
    """Why an adapter is incompatible; empty when it fits. Its tensors are fp32, or of their layer's dtype."""
    sent = forms(update.tensors)
    layers = sorted({name.rpartition(".lora_")[0] for name in sent})
    linear = sorted(name.removesuffix(".weight") for name, one in held.items() if len(one.shape) == 2)
    if not layers:
        return "the update has no tensors."
    for layer in layers:
        pair = [sent.get(f"{layer}.lora_{side}.weight") for side in "AB"]
        if layer not in linear:
            return f"the engine has no layer {layer!r}{did_you_mean(layer, linear) or '.'}"
        down, up = pair
        if down is None or up is None:
            return f"{layer!r} has only half of its adapter; both lora_A and lora_B are needed."
        base = held[f"{layer}.weight"]
        rank, (rows, columns) = down.shape[0], base.shape
        if (tuple(down.shape), tuple(up.shape)) != ((rank, columns), (rows, rank)):
            return (
                f"the adapter of {layer!r} has shapes {list(down.shape)} and {list(up.shape)}; a layer of "
                f"{list(base.shape)} needs [rank, {columns}] and [{rows}, rank]."
            )
        if rank > most_rank:
            return f"the adapter of {layer!r} has rank {rank}, but engine.lora_rank is {most_rank}; set it to {rank}."
        if rank != next(iter(sent.values())).shape[0]:
            return f"the adapter of {layer!r} has rank {rank}, others differ; all must have the same rank."
        for tensor in (down, up):
            if described(tensor).dtype not in ("float32", base.dtype):
                return f"the adapter of {layer!r} is {described(tensor).dtype}, expected float32 or {base.dtype}."
    if len(sent) != 2 * len(layers):
        return f"got {len(sent)} tensors for {len(layers)} layers, expected one lora_A and lora_B per layer."
    return ""


@contextmanager
def files_of(update: WeightUpdate, *, folder: str, names: Collection[str] | None = None) -> Iterator[list[str]]:
    """The update as safetensors files, deleted when the block ends. Raises RunFailed if there is no space.

    names: of the tensors that are written; None is all.
    folder: for the files; empty uses shared memory, or the temporary folder if they do not fit.
    """
    size = sum(form.nbytes for form in forms(update.tensors).values())
    with ExitStack() as stack:
        home = None if folder else stack.enter_context(_in_shared_memory(size))
        if home is None:
            place = place_for(size, folder=folder, what="weights")
            home = stack.enter_context(tempfile.TemporaryDirectory(prefix=_prefix(), dir=place))
        paths: list[str] = []
        for number, piece in enumerate(_pieces(update.tensors, names)):
            paths.append(str(Path(home) / f"{number}.safetensors"))
            save_file(piece, paths[-1])
        yield paths


@contextmanager
def _in_shared_memory(size: int) -> Iterator[str | None]:
    """A folder for `size` bytes, deleted when the block ends; None where they do not fit. Waits for the space of other
    engines of this machine that are sent weights at the same time."""
    if not SHARED_MEMORY.is_dir():
        yield None
        return
    with (
        tempfile.TemporaryDirectory(prefix=_prefix(), dir=SHARED_MEMORY) as name,
        (Path(name) / f"{LOCK}.new").open("wb") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Only now: a lock that another process finds is either held or left behind.
        Path(lock.name).rename(Path(name) / LOCK)
        while (is_claimed := _claim(lock, size)) is None:
            time.sleep(0.1)
        yield name if is_claimed else None


def _claim(lock: IO[bytes], size: int) -> bool | None:
    """Claim space in shared memory, by the length of the lock, which takes none. Returns whether there is enough; None
    where others have claims that end."""
    with (SHARED_MEMORY / f"unirl-claims-{os.getuid()}").open("ab") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        _remove_left()
        others = _claims()
        unwritten = sum(max(0, claimed - written) for claimed, written in others)
        fits = shutil.disk_usage(SHARED_MEMORY).free > 1.05 * (size + unwritten)
        lock.truncate(size if fits else 0)
        return None if others and not fits else fits


def _prefix() -> str:
    return f"{PREFIX}{os.getpid()}-"


def _claims() -> list[tuple[int, int]]:
    """Bytes that each process has claimed in shared memory, and those that it has written."""
    result: list[tuple[int, int]] = []
    for folder in SHARED_MEMORY.glob(f"{PREFIX}*"):
        with suppress(OSError):
            written = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
            if claimed := (folder / LOCK).stat().st_size:
                result.append((claimed, written))
    return result


def _remove_left() -> None:
    """Remove this user's folders in shared memory whose processes were killed.

    Locks tell, not process ids: containers that share /dev/shm number their processes apart, so that a live one may
    look dead, while the kernel drops a process's lock however it ends.
    """
    for folder in SHARED_MEMORY.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if folder.lstat().st_uid == os.getuid():
                with (folder / LOCK).open("rb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)


def place_for(size: float, *, folder: str, what: str) -> Path:
    """The folder for files of `size` bytes. folder, and the error without space: as of `files_of`.  what: they hold,
    for the error."""
    places = [Path(folder)] if folder else [SHARED_MEMORY, Path(tempfile.gettempdir())]
    fitting = [place for place in places if place.is_dir() and shutil.disk_usage(place).free > 1.05 * size]
    if not fitting:
        raise RunFailed(
            f"engine.transfer_dir: no space for {size / 2**20:.0f} MiB of {what} in {' or '.join(map(str, places))}. "
            "Set a folder with enough space."
        )
    return fitting[0]


def _pieces(tensors: Mapping[str, Tensor], names: Collection[str] | None) -> Iterator[dict[str, Tensor]]:
    """Pieces in the original order, so that the engine gets the tensors of a layer together."""
    piece: dict[str, Tensor] = {}
    size = 0
    # Also those that are left out: where making a tensor is collective, all ranks make it.
    for name, tensor in tensors.items():
        if names is not None and name not in names:
            continue
        own = tensor.numel() * tensor.element_size()
        if piece and size + own > FILE_BYTES:
            yield piece
            piece, size = {}, 0
        # safetensors rejects tensors that share memory.
        piece[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        size += own
    if piece:
        yield piece
