"""The server's side of what every engine for text does: weights from files, texts on their way to the host.

Goes along with the server's source; imports torch and safetensors alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from unirl.core.weights import checksum

__all__ = ["generated", "read_weights"]


def read_weights(paths: Sequence[str], expected: str) -> dict[str, Tensor]:
    """The tensors of these files. Raises ValueError when they are not those of the checksum."""
    tensors: dict[str, Tensor] = {}
    for path in paths:
        tensors |= load_file(path)
    found = checksum(tensors)
    if found != expected:
        raise ValueError(f"weights with checksum {expected} were sent, {found} came.")
    return tensors


def generated(
    tokens: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]], finish_reasons: Sequence[str | None]
) -> tuple[Any, Mapping[str, Any]]:
    """The answer to `generate`: `finish_reasons` of each text; tensors `tokens` and `log_probs` of all of them in a
    row, `lengths` [N]."""
    for row, values in zip(tokens, log_probs, strict=True):
        if len(row) != len(values):
            raise RuntimeError(f"a text of {len(row)} tokens came with {len(values)} log-probs.")
    found = {
        "tokens": torch.tensor([token for row in tokens for token in row], dtype=torch.int64),
        "log_probs": torch.tensor([value for row in log_probs for value in row], dtype=torch.float32),
        "lengths": torch.tensor([len(row) for row in tokens], dtype=torch.int64),
    }
    return {"finish_reasons": list(finish_reasons)}, found
