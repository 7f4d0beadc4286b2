"""The output projection a few rows at a time: logits, their log-softmax, and the gradients of what they came from.

For losses over the vocabulary that never hold all logits. Products of bf16 factors on CUDA have fp32 sums; elsewhere
the factors are cast to fp32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = [
    "LOGITS_BUDGET",
    "OutputGradients",
    "log_softmax_of",
    "logits_of",
    "result_dtype",
    "row_slices",
    "rows_at_a_time",
]

LOGITS_BUDGET = 2**26
"""Elements of one chunk of logits, 256 MiB in fp32. With a vocabulary of 150,000 tokens it is 440 rows, enough that
re-reading the weight for every chunk does not dominate."""


class OutputGradients:
    """Gradients of hidden states [T, D], weight [V, D] and bias [V], accumulated over chunks of the rows.

    Those of the weight are accumulated in fp32 for a 16-bit weight. No temporary has more than `chunk` * V elements.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, *, needs: tuple[bool, bool, bool], chunk: int
    ) -> None:
        """needs: which of the three are computed.  chunk: rows of logits at a time."""
        self._sources, self._chunk, self._dtype = (hidden, weight, bias), chunk, result_dtype(hidden, weight)
        self._hidden = torch.empty_like(hidden, dtype=self._dtype) if needs[0] else None
        self._weight = torch.zeros_like(weight, dtype=self._dtype) if needs[1] else None
        self._bias = torch.zeros_like(bias, dtype=self._dtype) if bias is not None and needs[2] else None

    def add(self, rows: slice, grad_logits: Tensor) -> None:
        """grad_logits: [c, V], of these rows, each of which is added once."""
        hidden, weight, _ = self._sources
        if self._bias is not None:
            self._bias += grad_logits.sum(dim=0)
        if _uses_tensor_cores(hidden, weight):
            grad_logits = grad_logits.to(weight.dtype)
        if self._hidden is not None:
            self._hidden[rows] = 0
            for words in _word_blocks(hidden, weight, limit=self._chunk):
                self._hidden[rows] += _product(grad_logits[:, words], weight[words], self._dtype)
        if self._weight is not None:
            for words in row_slices(len(weight), _block_size(weight, limit=self._chunk)):
                _add_product(self._weight[words], grad_logits[:, words].T, hidden[rows])

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """In the dtypes of what they are gradients of; None for those not needed."""
        pairs = zip((self._hidden, self._weight, self._bias), self._sources, strict=True)
        hidden, weight, bias = (None if a is None or b is None else a.to(b.dtype) for a, b in pairs)
        return hidden, weight, bias


def log_softmax_of(rows: Tensor, weight: Tensor, bias: Tensor | None, *, temperature: float, chunk: int) -> Tensor:
    """[c, D] -> [c, V] in fp32 or fp64."""
    logits = logits_of(rows, weight, chunk=chunk)
    if bias is not None:
        logits += bias
    return torch.log_softmax(logits.div_(temperature), dim=1)


def logits_of(rows: Tensor, weight: Tensor, *, chunk: int) -> Tensor:
    """[c, D] -> [c, V] in fp32 or fp64, without the bias."""
    dtype = result_dtype(rows, weight)
    blocks = [*_word_blocks(rows, weight, limit=chunk)]
    if len(blocks) == 1:
        return _product(rows, weight.T, dtype)
    logits = rows.new_empty(len(rows), len(weight), dtype=dtype)
    for words in blocks:
        logits[:, words] = _product(rows, weight[words].T, dtype)
    return logits


def rows_at_a_time(weight: Tensor) -> int:
    """As many rows of logits as the budget allows."""
    return max(1, LOGITS_BUDGET // max(1, len(weight)))


def row_slices(length: int, size: int) -> Iterator[slice]:
    """Slices of up to `size` that cover 0 to `length`."""
    return (slice(start, min(start + size, length)) for start in range(0, length, max(1, size)))


def result_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """fp32, or fp64 for fp64 inputs."""
    return torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right, accumulated in `dtype`."""
    if _uses_tensor_cores(left, right):
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.to(dtype) @ right.to(dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, accumulated in the total's dtype."""
    if _uses_tensor_cores(left, right):
        total += _product(left, right, total.dtype)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def _uses_tensor_cores(*factors: Tensor) -> bool:
    # Not fp16: gradients of logits are far below its range.
    return all(factor.is_cuda and factor.dtype == torch.bfloat16 for factor in factors)


def _word_blocks(hidden: Tensor, weight: Tensor, *, limit: int) -> Iterator[slice]:
    """Blocks of the vocabulary; if they are cast for the product, no larger than `limit` rows of logits."""
    is_cast = weight.dtype != result_dtype(hidden, weight) and not _uses_tensor_cores(hidden, weight)
    return row_slices(len(weight), _block_size(weight, limit=limit) if is_cast else len(weight))


def _block_size(weight: Tensor, *, limit: int) -> int:
    """Tokens whose rows of the weight have at most as many elements as `limit` rows of logits."""
    return max(1, limit * len(weight) // max(1, weight.shape[1]))
