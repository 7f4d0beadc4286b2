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
    """Dist -> what the lock allows of it. Each is pinned to one version, with a hash at least."""
    found: dict[str, Pin] = {}
    for line in text.replace("\\\n", " ").splitlines():
        if line and not line.startswith("#"):
            asked, *words = line.split()
            dist, pinned, version = asked.partition("==")
            hashes = frozenset(word.removeprefix(HASH) for word in words if word.startswith(HASH))
            assert pinned and hashes, f"{asked} is not pinned, or has no hash"
            found[dist] = Pin(version=version, hashes=hashes)
    return found
