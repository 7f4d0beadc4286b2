"""The checksum changes with every bit that counts and with nothing else."""

import pytest
import torch
from unirl.core.types.weights import WORDS_PER_ROW, checksum, fingerprint

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


def test_the_fingerprint_is_its_formula():
    """In integers of any size. Three levels: the last row of the first is not full, nor is the only one of the others."""
    values = torch.randn(WORDS_PER_ROW * 3 + 7, generator=torch.Generator().manual_seed(0))
    factors = [factor | 1 for factor in split_mix(WORDS_PER_ROW)]
    words = [int(word) for word in values.view(torch.int32)]
    while True:
        rows = [words[start : start + WORDS_PER_ROW] for start in range(0, len(words), WORDS_PER_ROW)]
        sums = [sum(word * factor for word, factor in zip(row, factors, strict=False)) % 2**64 for row in rows]
        if len(sums) == 1:
            break
        halves = [half for number in sums for half in (number % 2**32, number >> 32)]
        words = [half - 2**32 if half >= 2**31 else half for half in halves]
    assert fingerprint(values) == sums[0]
    # A number of bytes that is not a multiple of 4, and a view at an odd offset, hash as the same bytes padded with zeros.
    raw = values.view(torch.uint8)
    assert fingerprint(raw[1:10]) == fingerprint(torch.cat([raw[1:10], raw.new_zeros(3)]))
    assert fingerprint(values[:0]) == 0


def test_factors_are_those_of_the_published_generator():
    # The first numbers of SplitMix64 with seed 0 (Vigna's reference code).
    assert split_mix(3) == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    for place, factor in enumerate(split_mix(3)):
        one = torch.zeros(3, dtype=torch.int32)
        one[place] = 1
        assert fingerprint(one) == factor | 1


@pytest.mark.parametrize("swapped", [(0, 1), (3, 4 * WORDS_PER_ROW), (WORDS_PER_ROW, 2 * WORDS_PER_ROW)])
def test_the_order_of_words_counts(swapped):
    values = torch.randn(5 * WORDS_PER_ROW, generator=torch.Generator().manual_seed(1))
    other = values.clone()
    other[list(swapped)] = values[list(reversed(swapped))]
    assert fingerprint(values) != fingerprint(other)


@pytest.mark.gpu
def test_a_gpu_has_the_same_fingerprint():
    values = torch.randn(3, 5 * 2**20 + 1, generator=torch.Generator().manual_seed(2))
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        tensor = values.to(dtype)
        assert fingerprint(tensor.cuda()) == fingerprint(tensor)


def split_mix(count):
    """The first numbers of SplitMix64 with seed 0."""
    result, mask = [], 2**64 - 1
    for number in range(1, count + 1):
        z = number * 0x9E3779B97F4A7C15 & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        result.append(z ^ z >> 31)
    return result
