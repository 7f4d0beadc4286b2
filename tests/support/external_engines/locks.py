"""Locks of engines' environments, as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Pin", "read_lock"]

HASH = "--hash=sha256:"


@dataclass(frozen=True, kw_only=True)
class Pin:
    version: str
    hashes: frozenset[str]


def read_lock(text: str) -> Mapping[str, Pin]:
    """Dist -> its specifier in the lock. Each is pinned to one version, with at least one hash."""
    result: dict[str, Pin] = {}
    for line in text.replace("\\\n", " ").splitlines():
        if line and not line.startswith("#"):
            asked, *words = line.split()
            dist, pinned, version = asked.partition("==")
            hashes = frozenset(word.removeprefix(HASH) for word in words if word.startswith(HASH))
            assert pinned and hashes, f"{asked} is not pinned, or has no hash"
            result[dist] = Pin(version=version, hashes=hashes)
    return result
