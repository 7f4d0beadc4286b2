"""The default transport: each process keeps its tensors, and fetches rows from the others on request."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from unirl.core.errors import RunFailed
from unirl.core.roles import RemoteRowsLike, TransportCounts, TransportPlace
from unirl.core.specs.part_config import PartConfig

__all__ = ["Blob", "TensorStore", "Wanted", "build"]


@dataclass(frozen=True)
class Blob:
    """A tensor kept by a worker."""

    owner: str
    """Name of the worker."""
    number: int


Wanted = Sequence[tuple[int, int, int]]
"""(number of the tensor, first row, number of rows) of each piece."""


def build(config: PartConfig, *, place: TransportPlace) -> TensorStore:
    """A store that reuses no tensor numbers of another process: this one may replace a dead process of that name."""
    first = secrets.randbits(48)
    return TensorStore(place.process, ask=place.ask, device=torch.device(place.device), first=first)


class TensorStore:
    """Keeps tensors under numbers until they are dropped. Fits `unirl.core.roles.Transport`.

    Other threads may read and count while one keeps, fetches and drops.
    """

    address: Any = None
    """No address: the launcher routes requests to their owner."""

    def __init__(
        self, owner: str, *, ask: Callable[[str, Wanted], list[Tensor]], device: torch.device, first: int = 1
    ) -> None:
        """ask: fetches pieces from another worker's store, by its name.  device: of fetched rows.

        first: number of the first tensor.
        """
        self.owner = owner
        self._ask = ask
        self._device = device
        self._tensors: dict[int, Tensor] = {}
        self._next = first
        self._lock = threading.Lock()
        self._sent = 0
        self._fetched = 0

    def counts(self) -> TransportCounts:
        with self._lock:
            held = sum(tensor.nbytes for tensor in self._tensors.values())
            return TransportCounts(bytes_sent=self._sent, bytes_fetched=self._fetched, bytes_held=held)

    def keep(self, tensors: Sequence[Tensor]) -> list[Blob]:
        """Store the tensors without copying; they must not be modified until they are dropped."""
        with self._lock:
            blobs = [Blob(self.owner, self._next + index) for index in range(len(tensors))]
            self._next += len(tensors)
            self._tensors |= {blob.number: tensor.detach() for blob, tensor in zip(blobs, tensors, strict=True)}
        return blobs

    def drop(self, names: Sequence[Blob] | None = None) -> None:
        """Drop these tensors, or all, once their rollout has been trained on."""
        with self._lock:
            for number in list(self._tensors) if names is None else [name.number for name in names]:
                self._tensors.pop(number, None)

    def answer(self, question: Wanted) -> list[Tensor]:
        """Rows stored here, on the CPU, for another worker; each with storage for its own rows only.

        Raises RunFailed for a tensor that was dropped, IndexError for rows that it does not have.
        """
        result = [_packed(tensor.cpu()) for tensor in self._rows(question)]
        with self._lock:
            self._sent += sum(tensor.nbytes for tensor in result)
        return result

    def fetch(self, wanted: Sequence[RemoteRowsLike]) -> list[Tensor]:
        """The tensors, on this worker's device. One request per owner."""
        questions: dict[str, list[tuple[int, int, int]]] = {}
        for rows in wanted:
            for piece in rows.pieces:
                questions.setdefault(piece.blob.owner, []).append((piece.blob.number, piece.start, piece.count))
        answers = {owner: iter(self._from(owner, question)) for owner, question in questions.items()}
        tensors: list[Tensor] = []
        for rows in wanted:
            parts = [next(answers[piece.blob.owner]) for piece in rows.pieces]
            if len(parts) == 1:
                tensors.append(parts[0])
            elif parts:
                tensors.append(torch.cat(parts))
            else:
                tensors.append(torch.empty(rows.shape, dtype=rows.dtype, device=self._device))
        return tensors

    def close(self) -> None:
        self.drop()

    def _from(self, owner: str, question: Wanted) -> list[Tensor]:
        if owner == self.owner:
            return [tensor.to(self._device) for tensor in self._rows(question)]
        result = self._ask(owner, question)
        with self._lock:
            self._fetched += sum(tensor.nbytes for tensor in result)
        return [tensor.to(self._device) for tensor in result]

    def _rows(self, wanted: Wanted) -> list[Tensor]:
        """Views, taken under the lock; they stay valid after a drop."""
        with self._lock:
            tensors = [self._tensors.get(number) for number, _, _ in wanted]
        result: list[Tensor] = []
        for tensor, (number, start, count) in zip(tensors, wanted, strict=True):
            if tensor is None:
                raise RunFailed(f"transport: tensor {number} of {self.owner!r} was dropped; its rollout is over.")
            if not 0 <= start <= start + count <= tensor.shape[0]:
                raise IndexError(
                    f"transport: got rows {start} to {start + count} of tensor {number} of {self.owner!r}, but "
                    f"it has {tensor.shape[0]}."
                )
            result.append(tensor if count == tensor.shape[0] else tensor[start : start + count])
        return result


def _packed(tensor: Tensor) -> Tensor:
    """The tensor in its own storage: pickling a view would send the whole base tensor."""
    packed = tensor.contiguous()
    return packed if packed.untyped_storage().nbytes() == packed.nbytes else packed.clone()
