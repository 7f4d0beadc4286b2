"""Noise: the same bits for any split, order, process and step."""

import hashlib
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from unirl.numerics.noise import INITIAL, noise, noise_digest

IDS = [f"r0:prompt:{prompt}:sample:{sample}" for prompt in range(3) for sample in range(2)]


@given(st.permutations(range(6)), st.integers(0, 6))
@settings(max_examples=20)
def test_noise_does_not_depend_on_split_or_order(order, cut):
    whole = noise(seed=7, rollout=3, ids=IDS, step=2, shape=(4, 3))
    ids = [IDS[i] for i in order]
    parts = [noise(seed=7, rollout=3, ids=half, step=2, shape=(4, 3)) for half in (ids[:cut], ids[cut:])]
    assert torch.equal(torch.cat(parts), whole[list(order)])


def test_noise_is_philox_keyed_by_blake2b():
    """Built here from the formula: the key is blake2b-128 of seed, rollout, step as int64 and the id in UTF-8."""
    digest = hashlib.blake2b(struct.pack("<3q", 7, 3, -1) + "prompt é".encode(), digest_size=16).digest()
    key = np.array(struct.unpack("<2Q", digest), dtype=np.uint64)
    expected = np.random.Generator(np.random.Philox(key=key)).standard_normal(7, dtype=np.float32)
    result = noise(seed=7, rollout=3, ids=["other", "prompt é"], step=INITIAL, shape=(7,))
    assert np.array_equal(result[1].numpy(), expected)


def test_each_part_of_the_key_changes_the_noise():
    base = {"seed": 1, "rollout": 2, "ids": ["a"], "step": 3}
    changed = [
        {},
        {"seed": 2},
        {"rollout": 1},
        {"ids": ["b"]},
        {"step": 2},
        {"step": INITIAL},
        {"rollout": 3, "step": 2},
    ]
    digests = [noise_digest(noise(**{**base, **change}, shape=(8,)))[0] for change in changed]
    assert len(set(digests)) == len(changed)


def test_equal_ids_get_equal_noise():
    result = noise(seed=1, rollout=0, ids=["group", "group", "other"], step=INITIAL, shape=(5,))
    assert torch.equal(result[0], result[1])
    assert not torch.equal(result[0], result[2])


def test_another_process_gets_the_same_bits():
    code = (
        "from unirl.numerics.noise import noise, noise_digest;"
        f"print(*noise_digest(noise(seed=7, rollout=3, ids={IDS!r}, step=2, shape=(4, 3))))"
    )
    out = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert tuple(out.stdout.split()) == noise_digest(noise(seed=7, rollout=3, ids=IDS, step=2, shape=(4, 3)))


def test_the_stream_of_numpy_has_not_changed():
    """Recorded from numpy 2, in numpy's own words: another numpy that draws otherwise would break a mixed fleet."""
    drawn = np.random.Generator(np.random.Philox(key=0)).standard_normal(1024, dtype=np.float32)
    assert hashlib.blake2b(drawn.astype("<f4").tobytes(), digest_size=8).hexdigest() == "765f3c695aa5e514"


def test_noise_is_standard_normal():
    x = noise(seed=0, rollout=0, ids=[str(i) for i in range(64)], step=0, shape=(1024,)).double()
    count = x.numel()
    # Five standard errors of the mean, the variance and the fourth moment (whose variance is 96).
    assert abs(float(x.mean())) < 5 / count**0.5
    assert abs(float(x.var()) - 1) < 5 * (2 / count) ** 0.5
    assert abs(float((x**4).mean()) - 3) < 5 * (96 / count) ** 0.5
    # Rows, and equal rows of neighbouring steps, are uncorrelated: five standard errors again.
    other = noise(seed=0, rollout=0, ids=[str(i) for i in range(64)], step=1, shape=(1024,)).double()
    assert abs(float((x * other).mean())) < 5 / count**0.5
    assert abs(float((x[1:] * x[:-1]).mean())) < 5 / (count - 1024) ** 0.5


def test_noise_leaves_the_global_generators_alone():
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    noise(seed=0, rollout=0, ids=IDS, step=0, shape=(4,))
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4, 5, 2)])
def test_noise_has_the_asked_shape(shape):
    result = noise(seed=0, rollout=0, ids=IDS, step=0, shape=shape)
    assert result.shape == (len(IDS), *shape)
    assert result.dtype == torch.float32
    assert noise(seed=0, rollout=0, ids=[], step=0, shape=shape).shape == (0, *shape)


def test_the_digest_is_of_the_fp32_bytes_of_each_row():
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    expected = tuple(hashlib.blake2b(struct.pack("<2f", *row), digest_size=8).hexdigest() for row in ((1, 2), (3, 4)))
    assert noise_digest(x) == expected
    assert noise_digest(x.T.contiguous().T) == expected
    assert noise_digest(x.double()) == expected
