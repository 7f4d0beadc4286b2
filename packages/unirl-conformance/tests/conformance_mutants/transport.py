"""Transports that are broken in one way each, next to the one of the runtime."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.hookspec import hookimpl
from unirl.core.roles import TransportCounts, TransportPlace
from unirl.core.specs.spec import TransportSpec
from unirl.runtime.plugin import unirl_transports
from unirl.transfer.tensor_store import Blob, TensorStore

from conformance_mutants.mutant import mutant, mutants_in

(STORE,) = unirl_transports()


@mutant(claim="rows-arrive-bit-for-bit", name="sends-fp32", breaks="sends every dtype as fp32")
class SendsFp32(TensorStore):
    """What travels, travels as fp32."""

    def fetch(self, wanted: Any) -> list[Tensor]:
        return [
            rows.float().to(rows.dtype) if rows.is_floating_point() else rows.float().long().to(rows.dtype)
            for rows in super().fetch(wanted)
        ]


@mutant(claim="names-are-small-and-never-reused", name="long-names", breaks="has names of two kilobytes")
class NamesByShape(TensorStore):
    """Names carry what the tensor looks like, at length."""

    def keep(self, tensors: Sequence[Tensor]) -> list[Any]:
        return [LongBlob(blob.owner, blob.number, "x" * 2048) for blob in super().keep(tensors)]


@dataclasses.dataclass(frozen=True)
class LongBlob(Blob):
    described: str = ""


@mutant(claim="names-are-small-and-never-reused", breaks="gives its names again once everything was dropped")
class StartsNamesAnew(TensorStore):
    def drop(self, names: Any = None) -> None:
        super().drop(names)
        if names is None:
            self._next = 1


@mutant(
    claim="rows-that-were-dropped-are-refused",
    name="zeros-for-dropped",
    breaks="gives zeros for tensors that were dropped",
)
class GivesZerosForDropped(TensorStore):
    def _rows(self, wanted: Any) -> list[Tensor]:
        with self._lock:
            for number, start, count in wanted:
                self._tensors.setdefault(number, torch.zeros(start + count, 3, 4, 5))
        return super()._rows(wanted)


@mutant(claim="bytes-are-counted", breaks="counts the tensors that it holds, not their bytes")
class CountsTensors(TensorStore):
    def counts(self) -> TransportCounts:
        counts = super().counts()
        with self._lock:
            return dataclasses.replace(counts, bytes_held=len(self._tensors))


@mutant(claim="closed-transports-leave-nothing-behind", breaks="leaves a process behind in the driver")
class LeavesAProcess(TensorStore):
    def close(self) -> None:
        super().close()
        if self.owner == "driver":
            # In a session of its own, so that the end of the run does not end it; and not for ever.
            subprocess.Popen(["sleep", "40"], start_new_session=True)


BROKEN = mutants_in(__name__)
MUTANTS = list(BROKEN.values())


def build(config: Any, *, place: TransportPlace) -> TensorStore:
    """The transport that the config's `use` names."""
    kind = next(kind for kind, mutant in BROKEN.items() if mutant.name == config.use)
    return kind(place.process, ask=place.ask, device=torch.device(place.device))


def catalog() -> Catalog:
    specs: list[TransportSpec] = [
        dataclasses.replace(STORE, name=mutant.name, build=f"{__name__}:build") for mutant in MUTANTS
    ]
    return Catalog.of(
        {
            "unirl-well": SimpleNamespace(unirl_transports=hookimpl(lambda: [STORE])),
            "unirl-mutants": SimpleNamespace(unirl_transports=hookimpl(lambda: specs)),
        }
    )
