"""JSON that every parser reads, which Python's default is not: `Infinity` and `NaN` are no JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, cast

__all__ = ["strict_json"]


def strict_json(value: Any, **layout: Any) -> str:
    """JSON text of a value; numbers that are not finite are null. layout: arguments of `json.dumps`."""
    try:
        return json.dumps(value, allow_nan=False, **layout)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, **layout)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in cast("list[Any]", value)]
    return value
