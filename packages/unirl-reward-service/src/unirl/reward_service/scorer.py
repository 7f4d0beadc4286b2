"""The process of one scorer: batches of request bodies on stdin, scores or errors on stdout, as frames of msgpack.

A frame is its size and its bytes; a batch is the number of its bodies, and a frame for each.

Pixels are decoded here: whatever hostile bytes do to a decoder ends this process and no other. It ends with the
service, however that ends.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import queue
import struct
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

import msgspec
from unirl.core.cli.discovery import discover
from unirl.core.errors import BatchError, RewardFailed, UniRLError
from unirl.core.roles import ScoreInput, Scores
from unirl.core.specs.capability import Cap
from unirl.reward_service.wire import ScoreRequest, decode, sendable, to_samples
from unirl.reward_service.wire_pixels import WireError

from .loading import LoadedReward, load_reward

__all__ = ["SIZE", "main", "read_frame"]

SIZE = struct.Struct(">Q")
"""Size of a frame, before it."""


def main() -> None:
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # What a reward prints goes to the log.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    start = msgspec.msgpack.decode(read_frame(sys.stdin.buffer))
    try:
        loaded = load_reward(
            start["use"], start["settings"], device=start["device"], catalog=discover(), key=start["key"]
        )
    except Exception as error:
        text = _text(error) if isinstance(error, UniRLError) else f"{type(error).__name__}: {_text(error)}"
        _send(replies, {"failed": sendable(text)})
        raise SystemExit(1) from error
    _send(replies, {"ready": _described(loaded)})
    batches: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
    threading.Thread(target=_read_batches, args=(batches,), daemon=True).start()
    while True:
        _send(replies, score_bodies(loaded, batches.get()))


def read_frame(stream: IO[bytes]) -> bytes:
    """The next frame. Raises EOFError at the end of the stream."""
    return _exactly(stream, SIZE.unpack(_exactly(stream, SIZE.size))[0])


def _exactly(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


def score_bodies(loaded: LoadedReward, bodies: Sequence[bytes]) -> list[dict[str, Any]]:
    """A reply to each request: its scores, or `error`, a code and a message.

    Requests with media of one form are one batch. When a batch fails, each of its requests is scored alone, so that a
    sample that cannot be scored fails its own request.
    """
    results: list[dict[str, Any]] = [{} for _ in bodies]
    batches: dict[Any, list[tuple[int, ScoreInput]]] = {}
    # Metadata may be millions of small values. They have no cycles, and looking for some takes longer than all else.
    gc.disable()
    for index, body in enumerate(bodies):
        try:
            samples = to_samples(decode(body, ScoreRequest).samples)
        except WireError as error:
            results[index] = _error(error.code, str(error))
            continue
        batches.setdefault(_form(samples), []).append((index, samples))
    gc.freeze()
    gc.enable()
    for batch in batches.values():
        for index, result in zip((index for index, _ in batch), _score(loaded, [s for _, s in batch]), strict=True):
            results[index] = result
    gc.unfreeze()
    return results


def _score(loaded: LoadedReward, batch: list[ScoreInput]) -> list[dict[str, Any]]:
    try:
        scores = loaded.reward.score(_joined(batch))
    except Exception as error:  # noqa: BLE001 - each request gets its own
        if len(batch) > 1:
            return [result for samples in batch for result in _score(loaded, [samples])]
        if isinstance(error, RewardFailed | BatchError):
            return [_error("reward_failed", _text(error))]
        return [_error("reward_failed", f"reward.{loaded.spec.name}: raised {type(error).__name__}: {_text(error)}")]
    return _split(scores, [len(samples.sample_ids) for samples in batch])


def _split(scores: Scores, sizes: Sequence[int]) -> list[dict[str, Any]]:
    scored = None if scores.scored is None else scores.scored.tolist()
    columns = {"values": scores.values, **{f"parts/{name}": column for name, column in scores.parts.items()}}
    lists = {name: column.detach().float().cpu().tolist() for name, column in columns.items()}
    if scored is not None:
        lists = {n: [v if is_scored else 0.0 for v, is_scored in zip(c, scored, strict=True)] for n, c in lists.items()}
    results: list[dict[str, Any]] = []
    start = 0
    for size in sizes:
        rows = slice(start, start + size)
        parts = {name.removeprefix("parts/"): column[rows] for name, column in lists.items() if name != "values"}
        own = None if scored is None else scored[rows]
        results.append({"values": lists["values"][rows], "parts": parts, "scored": own})
        start += size
    return results


def _form(samples: ScoreInput) -> object:
    """Samples of one form can be joined."""
    media = samples.media
    optional = (samples.status is None, samples.lengths is None)
    if media is None or media.kind == "text":
        return (*optional, media is None)
    if isinstance(media.values, tuple):
        return (*optional, media.kind, media.rate)
    return (*optional, media.kind, media.rate, tuple(media.values.shape[1:]), media.values.dtype)


def _joined(batch: Sequence[ScoreInput]) -> ScoreInput:
    """One batch of several requests. Ids of different runs may be equal, so each gets the number of its request."""
    if len(batch) == 1:
        return batch[0]
    return ScoreInput.concat(
        [
            dataclasses.replace(
                samples,
                sample_ids=tuple(f"{number}:{name}" for name in samples.sample_ids),
                group_ids=tuple(f"{number}:{name}" for name in samples.group_ids),
                inputs=dataclasses.replace(samples.inputs, ids=tuple(f"{number}:{i}" for i in samples.inputs.ids)),
            )
            for number, samples in enumerate(batch)
        ]
    )


def _described(loaded: LoadedReward) -> dict[str, Any]:
    spec = loaded.spec
    return {
        "use": spec.name,
        "version": loaded.version,
        "media": spec.media,
        "scale": spec.scale,
        "parts": list(spec.parts),
        "metadata": list(spec.metadata),
        "scores_groups": Cap.REWARD_GROUP in spec.capabilities,
    }


def _error(code: str, message: str) -> dict[str, Any]:
    return {"error": [code, sendable(message)]}


def _text(error: Exception) -> str:
    try:
        return str(error)
    except Exception as other:  # noqa: BLE001 - of a reward's own class of errors
        return f"its message cannot be shown: {type(other).__name__}"


def _read_batches(batches: queue.SimpleQueue[list[bytes]]) -> None:
    """Reads ahead, and ends the process with the service, also in the middle of a score."""
    stream = sys.stdin.buffer
    try:
        while True:
            (count,) = SIZE.unpack(_exactly(stream, SIZE.size))
            batches.put([read_frame(stream) for _ in range(count)])
    except EOFError:
        os._exit(0)


def _send(replies: IO[bytes], message: Mapping[str, Any] | list[dict[str, Any]]) -> None:
    data = msgspec.msgpack.encode(message)
    replies.write(SIZE.pack(len(data)) + data)
    replies.flush()


if __name__ == "__main__":
    main()
