"""Messages between the driver and a worker, as bytes."""

from __future__ import annotations

import pytest
import torch
from unirl.transfer.wire import packed, unpacked


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6, dtype=torch.int64).reshape(2, 3),
        torch.randn(3, 4).t(),
        torch.randn(2, 2).to(torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor(1.5),
        torch.empty(0, 3),
        torch.nn.Parameter(torch.randn(2)),
    ],
    ids=["ints", "transposed", "bfloat16", "bools", "scalar", "empty", "parameter"],
)
def test_tensors_come_back_bit_for_bit(tensor: torch.Tensor) -> None:
    result = unpacked(packed({"x": [tensor]}))["x"][0]
    assert (result.dtype, result.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(result, tensor.detach())
    result.add_(result)  # and can be written to


def test_a_small_tensor_costs_little_more_than_its_bytes() -> None:
    # Two references to torch's names, a dtype and a shape: 160 bytes are enough for those.
    assert len(packed(torch.zeros(8))) < 32 + 160


def test_a_tensor_named_twice_travels_once() -> None:
    tensor = torch.zeros(1000)
    assert len(packed([tensor, tensor])) < 4000 + 200
