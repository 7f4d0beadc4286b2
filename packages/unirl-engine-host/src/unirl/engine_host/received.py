"""Server side shared by all text engines: reads weights from files, and sends completions to the host.

Copied along with the server's source; imports only torch and safetensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from unirl.core.types.weights import joined, tensor_digest
from unirl.engine_host.frames import Unchanged

__all__ = ["Row", "WeightFiles", "generated", "read_weights", "rows"]


class Row(NamedTuple):
    """Prompt and media that a completion is generated from."""

    prompt: list[int]
    """Token ids."""
    key: str
    """Checksum of the tensors of its media; empty without media."""
    media: Mapping[str, Tensor]
    """Model inputs besides tokens, by the names of the checkpoint's processor, such as `pixel_values`."""


def rows(asked: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[Row]:
    """The rows of a call `generate`. asked: `media`, a key per row.  tensors: `prompts` [all tokens], `prompt_lengths`
    [N], and the media as `key/name`. Rows of one key share their tensors."""
    media: dict[str, dict[str, Tensor]] = {"": {}}
    for path, tensor in tensors.items():
        key, slash, name = path.partition("/")
        if slash:
            media.setdefault(key, {})[name] = tensor
    prompts = tensors["prompts"].split(tensors["prompt_lengths"].tolist())
    return [Row(row.tolist(), key, media[key]) for row, key in zip(prompts, asked["media"], strict=True)]


class WeightFiles:
    """The tensors in files of a sync, read one at a time, onto the engine's device."""

    def __init__(self, paths: Sequence[str], expected: str, *, device: Any = "cpu") -> None:
        """Raises Unchanged when their checksum is not the expected one."""
        self._paths, self._device = paths, str(device)
        digests = {name: tensor_digest(name, tensor) for name, tensor in self}
        self.names = frozenset(digests)
        result = joined(digests[name] for name in sorted(digests))
        if result != expected:
            raise Unchanged(f"weights: got checksum {result}, expected {expected}.")

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of each, read again by each iteration."""
        for path in self._paths:
            with safe_open(path, framework="pt", device=self._device) as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    yield name, file.get_tensor(name)


def read_weights(paths: Sequence[str], expected: str) -> dict[str, Tensor]:
    """The tensors in these files, on the CPU. Raises as `WeightFiles`."""
    return dict(WeightFiles(paths, expected))


def generated(
    tokens: Sequence[Sequence[int]],
    log_probs: Sequence[Sequence[float]],
    finish_reasons: Sequence[str | None],
    *,
    prompts: Sequence[Sequence[int]],
    media: Sequence[str],
    temperatures: Sequence[float],
    mask: Sequence[Sequence[bool]] | None = None,
    options: Mapping[str, Any] | None = None,
    version: int | None = None,
) -> tuple[Any, Mapping[str, Any]]:
    """The answer to `generate`: `finish_reasons`, `media` and `temperatures` per completion, `options` and
    `version`; concatenated tensors `tokens` and `log_probs` with their `lengths` [N], and concatenated `prompts` with
    `prompt_lengths` [N].

    prompts, temperatures: as used by the engine's worker, not as sent to it.  media: keys computed again from the
    tensors that it used.  mask: per completion and token, False where it was not sampled, such as a tool's output;
    sent as the tensor `mask`, bool, if there is one.  options: that the logits were computed with, by a worker that
    computes with any.  version: of the weights that the worker used, if it knows.
    """
    for name, rows_of in (("log-probs", log_probs), ("entries in its mask", mask)):
        for row, values in zip(tokens, rows_of, strict=True) if rows_of is not None else ():
            if len(row) != len(values):
                raise RuntimeError(f"a completion of {len(row)} tokens has {len(values)} {name}.")
    result = {
        "prompts": torch.tensor([token for row in prompts for token in row], dtype=torch.int64),
        "prompt_lengths": torch.tensor([len(row) for row in prompts], dtype=torch.int64),
        "tokens": torch.tensor([token for row in tokens for token in row], dtype=torch.int64),
        "log_probs": torch.tensor([value for row in log_probs for value in row], dtype=torch.float32),
        "lengths": torch.tensor([len(row) for row in tokens], dtype=torch.int64),
    }
    if mask is not None:
        result["mask"] = torch.tensor([value for row in mask for value in row], dtype=torch.bool)
    answer = {
        "finish_reasons": list(finish_reasons),
        "media": list(media),
        "temperatures": list(temperatures),
        "options": dict(options or {}),
        "version": version,
    }
    return answer, result
