"""Transports with one fault each, next to the one of the runtime."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from unirl.core.plugins.catalog import Catalog
from unirl.core.roles import TransportCounts
from unirl.transfer.plugin import unirl_transports
from unirl.transfer.tensor_store import Blob, TensorStore

from conformance_mutants.changes import returns, then
from conformance_mutants.mutant import Mutant, builder, catalog_of, plugin, specs

(STORE,) = unirl_transports()
NAMES = "names-are-small-and-never-reused"


def as_fp32(tensors: list[Tensor]) -> list[Tensor]:
    """Tensors that were fp32 on the way."""
    return [
        rows.float().to(rows.dtype) if rows.is_floating_point() else rows.float().long().to(rows.dtype)
        for rows in tensors
    ]


@dataclass(frozen=True)
class LongBlob(Blob):
    """A name that carries what the tensor looks like, at length."""

    described: str = ""


def long_names(blobs: list[Blob]) -> list[Blob]:
    return [LongBlob(blob.owner, blob.number, "x" * 2048) for blob in blobs]


def reuses_names(store: TensorStore, drop: Any, names: Any = None) -> None:
    count = len(store._tensors)
    drop(names)
    if names is None:
        store._next -= count


def zeros_for_dropped(store: TensorStore, rows: Any, wanted: Any) -> list[Tensor]:
    with store._lock:
        for number, start, count in wanted:
            store._tensors.setdefault(number, torch.zeros(start + count, 3, 4, 5))
    return rows(wanted)


def counts_tensors(store: TensorStore, counts: Any) -> TransportCounts:
    counted = counts()
    with store._lock:
        return replace(counted, bytes_held=len(store._tensors))


def leave_process(store: TensorStore) -> None:
    if store.owner == "driver":
        # In a separate session, so that it outlives the run; but not for ever.
        subprocess.Popen(["sleep", "40"], start_new_session=True)


def transport(name: str, claim: str, breaks: str, **changes: Any) -> Mutant:
    return Mutant(name=name, claim=claim, breaks=breaks, spec=STORE, changes=changes)


# fmt: off
MUTANTS = [
    transport("sends-fp32", "rows-arrive-bit-for-bit", "sends every dtype as fp32", fetch=returns(as_fp32)),
    transport("long-names", NAMES, "has names of two kilobytes", keep=returns(long_names)),
    transport("starts-names-anew", NAMES, "gives its names again once everything was dropped", drop=reuses_names),
    transport("zeros-for-dropped", "rows-that-were-dropped-are-refused", "gives zeros for tensors that were dropped",
              _rows=zeros_for_dropped),
    transport("counts-tensors", "bytes-are-counted", "counts the tensors that it holds, not their bytes",
              counts=counts_tensors),
    transport("leaves-a-process", "closed-transports-leave-nothing-behind", "leaves a process behind in the driver",
              close=then(leave_process)),
]
# fmt: on
build = builder(MUTANTS)


def catalog() -> Catalog:
    return catalog_of(plugin(transports=[STORE]), transports=specs(MUTANTS, module=__name__))
