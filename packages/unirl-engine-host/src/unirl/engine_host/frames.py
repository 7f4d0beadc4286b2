"""Wire format between host and server: frames of JSON and safetensors. No pickle, so no remote code execution.

Both ends use this file; the server's environment has torch and safetensors and no UniRL.

A frame: `MAGIC`, the size of its header (4 bytes) and of its body (8 bytes, both big-endian), the header as JSON, and
the body: nothing, or a safetensors file.
"""

from __future__ import annotations

import functools
import json
import struct
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "MAGIC",
    "UNCHANGED",
    "BadFrame",
    "Unchanged",
    "answers_errors",
    "raise_errors",
    "read_frame",
    "to_frame",
]

MAGIC = b"URF1"
UNCHANGED = "unchanged"
"""Key of an error answer that marks the call as rejected before it changed anything."""
_SIZES = struct.Struct(">4sIQ")
MAX_HEADER_BYTES = 256 * 2**20
MAX_BODY_BYTES = 64 * 2**30


class BadFrame(ValueError):
    """Bytes that are not a frame."""


class Unchanged(Exception):
    """Raised by a server's call that it rejects before changing anything; its answer then carries `unchanged`. After
    any other error the engine's state is unknown."""


def answers_errors(call: Callable[..., None]) -> Callable[..., Mapping[str, str] | None]:
    """A worker's method that returns its error instead of raising it, for `raise_errors`. Of a worker's exception
    engines pass on only the message, and some then mistake the next worker's answer for that of the next call."""

    @functools.wraps(call)
    def answered(*arguments: Any) -> Mapping[str, str] | None:
        try:
            call(*arguments)
        except Unchanged as refusal:
            return {UNCHANGED: str(refusal)}
        except Exception as error:  # noqa: BLE001 - of any kind; the log has its traceback
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {error}"}
        return None

    return answered


def raise_errors(method: str, results: Sequence[Any]) -> None:
    """Raise Unchanged when every worker refused the call before changing anything, RuntimeError when any failed.
    results: one for each worker, of a method with `answers_errors`."""
    failed = [one for one in results if isinstance(one, Mapping)]
    if failed and all(isinstance(one, Mapping) and UNCHANGED in one for one in results):
        raise Unchanged(f"{method}: {failed[0][UNCHANGED]}")
    if failed:
        raise RuntimeError(f"{method}: {[str(one.get('error') or dict(one)) for one in failed]}")


def to_frame(header: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> bytes:
    """Encode a message. header: JSON-able. Raises ValueError for values JSON cannot represent, NaN included."""
    body = b""
    if tensors:
        from safetensors.torch import save

        body = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    head = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
    return _SIZES.pack(MAGIC, len(head), len(body)) + head + body


def read_frame(receive: Callable[[int], bytes]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Decode a message. receive: returns exactly that many bytes. Raises BadFrame for bytes that are not a frame."""
    magic, head_size, body_size = _SIZES.unpack(receive(_SIZES.size))
    if magic != MAGIC or head_size > MAX_HEADER_BYTES or body_size > MAX_BODY_BYTES:
        raise BadFrame(f"got {magic!r} with sizes {head_size} and {body_size}, expected a frame.")
    try:
        header = json.loads(receive(head_size))
    except ValueError as error:
        raise BadFrame(f"the header of a frame is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise BadFrame("the header of a frame is not a JSON object.")
    tensors: dict[str, Tensor] = {}
    if body_size:
        from safetensors.torch import load

        tensors = load(receive(body_size))
    return cast("dict[str, Any]", header), tensors
