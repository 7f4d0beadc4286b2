"""What host and server say to each other: frames of JSON and safetensors. No pickle: neither runs what the other says.

Both ends use this file; the server's environment has torch and safetensors and no UniRL.

A frame: `MAGIC`, the size of its header (4 bytes) and of its body (8 bytes, both big-endian), the header as JSON, and
the body: nothing, or a safetensors file.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MAGIC", "BadFrame", "read_frame", "to_frame"]

MAGIC = b"URF1"
_SIZES = struct.Struct(">4sIQ")
MAX_HEADER_BYTES = 256 * 2**20
MAX_BODY_BYTES = 64 * 2**30


class BadFrame(ValueError):
    """Bytes that are no frame."""


def to_frame(header: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> bytes:
    """One message as bytes. header: JSON-able. Raises ValueError for what JSON cannot hold, NaN included."""
    body = b""
    if tensors:
        from safetensors.torch import save

        body = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    head = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
    return _SIZES.pack(MAGIC, len(head), len(body)) + head + body


def read_frame(receive: Callable[[int], bytes]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """One message. receive: returns just that many bytes. Raises BadFrame for bytes that are no frame."""
    magic, head_size, body_size = _SIZES.unpack(receive(_SIZES.size))
    if magic != MAGIC or head_size > MAX_HEADER_BYTES or body_size > MAX_BODY_BYTES:
        raise BadFrame(f"a frame was expected; {magic!r} with sizes {head_size} and {body_size} came.")
    try:
        header = json.loads(receive(head_size))
    except ValueError as error:
        raise BadFrame(f"the header of a frame is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise BadFrame("the header of a frame is no JSON object.")
    tensors: dict[str, Tensor] = {}
    if body_size:
        from safetensors.torch import load

        tensors = load(receive(body_size))
    return cast("dict[str, Any]", header), tensors
