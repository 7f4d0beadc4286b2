"""What the benches of all kinds have: the subject, the workshop, the numbers, an empty folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..subjects import Subject
from ..verdicts import Record
from ..workshop import Workshop

__all__ = ["Bench"]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What a claim is given. Made anew for every claim, so that no claim sees what another one did."""

    subject: Subject
    workshop: Workshop
    record: Record
    """Keeps numbers: `bench.record("log-prob gap", gap, bound=1e-5)`."""
    folder: Path
    """Empty, and this claim's own."""
    own_engine: bool = False
    """Whether the claim asks for engines that no other claim has."""

    @property
    def device(self) -> str:
        return self.subject.device
