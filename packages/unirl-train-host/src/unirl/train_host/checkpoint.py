"""Checkpoints through torch DCP: trainable weights and training state, readable by any number of ranks."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from unirl.core.errors import CheckpointError

from .checkpoint_metadata import TensorReader, read_metadata

__all__ = ["Opened", "read_facts", "read_keys", "read_tensors", "write"]

FACTS = "training.json"
FORMAT = 2


class Opened:
    """A checkpoint that was fully checked and fits; nothing has been loaded yet."""

    def __init__(
        self,
        folder: Path,
        *,
        setup: Mapping[str, Any],
        wanted: Mapping[str, Tensor],
        moments: Mapping[str, Tensor],
        single: bool,
    ) -> None:
        """setup: facts that must be equal.  wanted: tensors to fill.  moments: tensors to fill if they were saved.

        Raises CheckpointError if it is incomplete or from another configuration.
        """
        self.folder = folder
        self.facts = read_facts(folder)
        for key, here in setup.items():
            there = self.facts.get(key)
            if there != here:
                raise CheckpointError(
                    f"{folder}: the checkpoint was made with {key} = {there!r}; this recipe has {here!r}. "
                    "Resume with the recipe and the base checkpoint that it was made with."
                )
        result = read_keys(folder)
        check_keys(folder, found=result, wanted=wanted, optional=moments)
        self._wanted, self._single = wanted, single
        self._moments = {name: tensor for name, tensor in moments.items() if name in result}

    @torch.no_grad()
    def read(self) -> Mapping[str, Tensor]:
        """Fill the wanted tensors, and return the moments that were saved. Collective."""
        read_tensors(self.folder, {**self._wanted, **self._moments}, single=self._single)
        return self._moments


def write(
    folder: Path,
    *,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    is_writer: bool,
    single: bool,
    group: ProcessGroup | None = None,
) -> None:
    """Write tensors and facts. Collective; `is_writer` is true on one rank. DCP's metadata comes last and completes it.

    group: of all ranks, for a thread beside one that uses the default group; None is the default group.
    folder: its parent must exist: on another machine it does where the file system is shared, and nowhere else.
    Raises what the writer of a rank raised, an OSError before all others.
    """
    folder.mkdir(exist_ok=True)
    if is_writer:
        (folder / FACTS).write_text(json.dumps({"format": FORMAT, **facts}, indent=1), encoding="utf-8")
    try:
        # Expected of one rank without a process group. Not in `catch_warnings`, which is not thread-safe.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        save(dict(tensors), checkpoint_id=folder, process_group=group, no_dist=single)
    except CheckpointException as error:
        causes = [failure[0] for failure in error.failures.values()]
        cause = next((cause for cause in causes if isinstance(cause, OSError)), causes[0])
        # DCP's frames hold the tensors. The text of its error has the tracebacks of all ranks.
        raise cause.with_traceback(None) from error.with_traceback(None)


def read_facts(folder: Path) -> dict[str, Any]:
    """The facts that `write` saved with the tensors. Raises CheckpointError if they cannot be read."""
    path = folder / FACTS
    try:
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        result = facts["format"]
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder}: {FACTS} is missing, so this is not a checkpoint of a training backend."
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); resume from an older checkpoint.") from error
    if result != FORMAT:
        raise CheckpointError(f"{path}: got format {result}, expected {FORMAT}. Resume with the version that wrote it.")
    return facts


def read_keys(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> (shape, dtype) of every tensor of a checkpoint, after checking that all of its bytes are there."""
    metadata = read_metadata(folder)
    ends: dict[str, int] = {}
    for place in (metadata.storage_data or {}).values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in ends.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path}: is missing; resume from an older checkpoint.")
        size = path.stat().st_size
        if size < end:
            raise CheckpointError(f"{path}: is truncated, {size} bytes of at least {end}; resume from an older one.")
    return {
        name: (tuple(item.size), str(item.properties.dtype))
        for name, item in metadata.state_dict_metadata.items()
        if isinstance(item, TensorStorageMetadata)
    }


def read_tensors(folder: Path, into: Mapping[str, Tensor], *, single: bool) -> None:
    """Fill these tensors in place. Collective. Call `read_keys` first: it changes nothing."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            load(dict(into), storage_reader=TensorReader(folder), no_dist=single)
    except CheckpointException as error:
        causes = [failure[0] for failure in error.failures.values()]
        raise CheckpointError(f"{folder}: the checkpoint could not be read: {causes[0]!r}.") from error


def check_keys(
    folder: Path,
    *,
    found: Mapping[str, tuple[tuple[int, ...], str]],
    wanted: Mapping[str, Tensor],
    optional: Mapping[str, Tensor],
) -> None:
    """Raise a CheckpointError that lists the differences in names, shapes and dtypes.

    optional: tensors that may be absent, such as the moments of weights that never had a gradient.
    """
    known = {**optional, **wanted}
    told: list[str] = []
    missing = sorted(wanted.keys() - found.keys())
    unknown = sorted(found.keys() - known.keys())
    if missing:
        told.append(f"{len(missing)} tensors are missing from it, such as {missing[0]!r}")
    if unknown:
        told.append(f"it has {len(unknown)} unexpected tensors, such as {unknown[0]!r}")
    for name in sorted(found.keys() & known.keys()):
        here = (tuple(known[name].shape), str(known[name].dtype))
        if found[name] != here:
            told.append(f"{name!r} is {found[name][1]}{list(found[name][0])} there and {here[1]}{list(here[0])} here")
            break
    if told:
        raise CheckpointError(
            f"{folder}: the checkpoint belongs to another set-up: {'; '.join(told)}. "
            "Resume with the recipe that it was made with."
        )
