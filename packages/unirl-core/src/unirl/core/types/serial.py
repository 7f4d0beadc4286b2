"""Batches as bytes: one safetensors file whose metadata holds everything that is not a tensor, as JSON. No pickle.

Tensors come back bit for bit in their dtype. Only the types named here are written or read; a reader never imports
what the bytes name.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar, cast

from ..errors import BatchError
from .batch import Batch
from .data import MediaRef
from .inputs import Inputs, Turn
from .media import Media
from .request import LatentRequest, Request, TextRequest
from .sampling import LatentSamplingConfig, ScheduleConfig, SdeStepsConfig, TextSamplingConfig
from .track import Conditions, LatentSegment, Sampler, Status, TextSegment, Track

__all__ = ["FORMAT", "from_bytes", "to_bytes"]

FORMAT = 1
"""Version of the layout. Readers refuse any other."""

KEY = "unirl.batch"

T = TypeVar("T", bound=Batch)

DATACLASSES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Conditions,
        Inputs,
        LatentRequest,
        LatentSamplingConfig,
        LatentSegment,
        Media,
        MediaRef,
        Request,
        Sampler,
        ScheduleConfig,
        SdeStepsConfig,
        TextRequest,
        TextSamplingConfig,
        TextSegment,
        Track,
        Turn,
    )
}
ENUMS: dict[str, type[Enum]] = {"Status": Status}
NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""Floats that JSON cannot express."""


def to_bytes(value: Batch) -> bytes:
    """A request, a track or a segment as bytes.

    Raises BatchError, with the path of the field, for a value of a type that is not written.
    """
    from safetensors.torch import save

    writer = _Writer()
    structure = writer.encode(value, type(value).__name__)
    header = json.dumps({"format": FORMAT, "value": structure}, allow_nan=False, separators=(",", ":"))
    return save(writer.tensors, metadata={KEY: header})


def from_bytes(data: bytes, kind: type[T]) -> T:
    """The inverse of `to_bytes`. Raises BatchError for bytes that are cut off, damaged, of another format or type."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(json.loads(data[8 : 8 + size])["__metadata__"][KEY])
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise BatchError(
            f"from_bytes: {len(data)} bytes were given that no `to_bytes` wrote, or that were cut off: {error}."
        ) from error
    if header["format"] != FORMAT:
        raise BatchError(
            f"from_bytes: format {header['format']} was found; this version of unirl-core reads format {FORMAT}. "
            "Use the same unirl-core on both sides."
        )
    try:
        result = _decode(header["value"], tensors)
    except (KeyError, TypeError) as error:
        raise BatchError(f"from_bytes: the bytes are damaged: {error!r}.") from error
    if not isinstance(result, kind):
        raise BatchError(f"from_bytes: got the bytes of a {type(result).__name__}, expected a {kind.__name__}.")
    return result


class _Writer:
    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}

    def encode(self, value: Any, where: str) -> Any:
        """JSON of a value. What JSON lacks becomes an object with the one key that names it, such as `$tuple`."""
        kind = cast(type[Any], type(value))
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        if kind in (list, tuple):
            items = cast(Sequence[Any], value)
            encoded = [self.encode(item, f"{where}[{index}]") for index, item in enumerate(items)]
            return encoded if kind is list else {"$tuple": encoded}
        if isinstance(value, Mapping):
            # As pairs: keys of JSON objects are always text.
            pairs = cast(Mapping[Any, Any], value).items()
            return {"$map": [[self.encode(k, f"{where} key"), self.encode(v, f"{where}[{k!r}]")] for k, v in pairs]}
        if isinstance(value, Enum) and ENUMS.get(kind.__name__) is kind:
            return {"$enum": [kind.__name__, value.name]}
        if DATACLASSES.get(kind.__name__) is kind:
            names = [item.name for item in dataclasses.fields(kind)]
            return {f"${kind.__name__}": {name: self.encode(getattr(value, name), f"{where}.{name}") for name in names}}
        return self._tensor(value, where)

    def _tensor(self, value: Any, where: str) -> Any:
        import torch

        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            kind = cast(type[Any], type(value))
            raise BatchError(
                f"{where}: a {kind.__module__}.{kind.__qualname__} was given; batches are written with tensors, text, "
                "numbers, lists, tuples, mappings and the track types only. Convert it first."
            )
        if value.layout is not torch.strided:
            raise BatchError(f"{where}: a tensor of layout {value.layout} was given; only dense ones are written.")
        name = str(len(self.tensors))
        # Views share memory, which safetensors refuses; a copy holds these rows alone.
        self.tensors[name] = value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        return {"$tensor": name}


def _decode(value: Any, tensors: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in cast(list[Any], value)]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = cast(dict[str, Any], value).items()
    if tag == "$tensor":
        return tensors[content]
    if tag == "$float":
        return NUMBERS[content]
    if tag == "$tuple":
        return tuple(_decode(item, tensors) for item in content)
    if tag == "$map":
        return {_decode(key, tensors): _decode(item, tensors) for key, item in content}
    if tag == "$enum":
        return ENUMS[content[0]][content[1]]
    kind = DATACLASSES.get(tag[1:])
    if kind is None:
        raise BatchError(f"from_bytes: type {tag[1:]!r} is unknown here; known are {', '.join(sorted(DATACLASSES))}.")
    known = {item.name for item in dataclasses.fields(kind)}
    unknown = sorted(content.keys() - known)
    if unknown:
        raise BatchError(
            f"from_bytes: {kind.__name__} has no field {unknown[0]!r} here. Use the same unirl-core on both sides."
        )
    return kind(**{name: _decode(item, tensors) for name, item in content.items()})
