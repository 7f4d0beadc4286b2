"""Nested values as one level of key paths, and a digest of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, cast

__all__ = ["leaves", "plan_hash"]


def leaves(values: Mapping[str, Any], *, under: str = "") -> dict[str, Any]:
    """Key path -> value of every leaf; an empty mapping or list is itself a leaf."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{under}.{key}" if under else str(key)
        if isinstance(value, Mapping) and value:
            result |= leaves(cast(Mapping[str, Any], value), under=path)
        else:
            result[path] = value
    return result


def plan_hash(numbers: Mapping[str, Any]) -> str:
    """First 16 hex digits of the SHA-256 of `Plan.numeric_leaves`."""
    text = json.dumps(numbers, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
