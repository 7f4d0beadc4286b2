"""The checksum changes with every bit that counts and with nothing else."""

import pytest
import torch
from unirl.core.types.weights import checksum

TENSORS = {"a.weight": torch.arange(6.0).view(2, 3), "b": torch.tensor(2.5), "c": torch.zeros(0, 4)}


def test_order_layout_and_views_do_not_count():
    expected = checksum(TENSORS)
    assert checksum(dict(reversed(TENSORS.items()))) == expected
    transposed = TENSORS["a.weight"].t().contiguous().t()
    assert not transposed.is_contiguous() and checksum({**TENSORS, "a.weight": transposed}) == expected
    assert len(expected) == 32 and expected == checksum(TENSORS)


@pytest.mark.parametrize(
    "changed",
    [
        {**TENSORS, "a.weight": TENSORS["a.weight"].view(3, 2)},
        {**TENSORS, "a.weight": TENSORS["a.weight"].view(torch.int32)},
        {**TENSORS, "c": torch.zeros(4, 0)},
        {"a.weigh": TENSORS["a.weight"], "b": TENSORS["b"], "c": TENSORS["c"]},
        {"a.weight": TENSORS["a.weight"], "b": TENSORS["b"]},
        {**TENSORS, "a.weight": -TENSORS["a.weight"] * -1 + 0.0, "b": -TENSORS["b"]},
    ],
)
def test_shape_dtype_name_and_sign_count(changed):
    assert checksum(changed) != checksum(TENSORS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_one_bit_counts(dtype):
    tensor = torch.ones(1000, dtype=dtype)
    other = tensor.clone()
    other.view(torch.uint8)[777] ^= 1
    assert checksum({"w": tensor}) != checksum({"w": other})


def test_names_and_dtypes_cannot_run_into_each_other():
    one, two = torch.zeros(2), torch.zeros(3)
    assert checksum({"a": one, "b": two}) != checksum({"b": one, "a": two})
