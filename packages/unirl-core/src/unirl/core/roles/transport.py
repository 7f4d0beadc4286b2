"""Transports: they bring tensors from the process that made them to those that need them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..types.array import Array

__all__ = ["PieceLike", "RemoteRowsLike", "Transport", "TransportCounts", "TransportPlace"]


class PieceLike(Protocol):
    """Neighbouring rows of one kept tensor. See `unirl.transfer.remote_rows.Piece`."""

    @property
    def blob(self) -> Any:
        """Name of the tensor, as `Transport.keep` returned it."""
        ...

    @property
    def start(self) -> int: ...
    @property
    def count(self) -> int: ...


class RemoteRowsLike(Protocol):
    """[N, ...] rows that lie elsewhere, in pieces. See `unirl.transfer.remote_rows.RemoteRows`."""

    @property
    def pieces(self) -> Sequence[PieceLike]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class TransportPlace:
    """The process of a run that a transport works in."""

    run: str
    """A name that no other run on these machines has."""
    process: str
    """`driver`, or the name of the worker."""
    device: Any
    """Where fetched tensors are to be."""
    ask: Callable[[str, Any], Any]
    """ask(process, question): the `answer` of the transport in another worker."""
    address: Any = None
    """In a worker: the `address` of the driver's transport."""


@dataclass(frozen=True, kw_only=True)
class TransportCounts:
    """Traffic through the transport of one process so far."""

    bytes_sent: int
    """Bytes of rows that left this process."""
    bytes_fetched: int
    """Bytes of rows that came into it."""
    bytes_held: int
    """Bytes of tensors that it kept and has not dropped, wherever they are held."""


class Transport(Protocol):
    """Brings tensors from the process that made them to those that need them; the driver passes on their names alone.

    Build: `build(config, *, place: TransportPlace) -> Transport`, in the driver first, where it may start what all
    processes need, then in each worker. One thread at a time calls it; `answer` and `counts` come from any thread.
    """

    @property
    def address(self) -> Any:
        """Address that the workers' transports join by; picklable. Read from the driver's only."""
        ...

    def keep(self, tensors: Sequence[Array]) -> list[Any]:
        """A name for each tensor [N, ...], N > 0: hashable, below 1 KiB pickled, never reused.

        The tensors are not written to afterwards; their rows can be fetched until `drop`.
        """
        ...

    def fetch(self, wanted: Sequence[RemoteRowsLike]) -> list[Array]:
        """The rows, bit for bit, on the device of this process. Raises RunFailed for a tensor that was dropped."""
        ...

    def drop(self, names: Sequence[Any] | None = None) -> None:
        """Forget the tensors of these names, which this process kept; None forgets all that it kept.

        Their rows are gone once all that was kept in the same call is dropped, or earlier.
        """
        ...

    def answer(self, question: Any) -> Any:
        """The reply to an `ask` of another process, for transports whose processes exchange messages."""
        ...

    def counts(self) -> TransportCounts: ...
    def close(self) -> None:
        """Forget everything and stop what this one started, in the driver what all use. May be called twice."""
        ...
