"""Counter-based noise: every row is a pure function of (seed, rollout, sample id, step).

No generator is carried anywhere, so batch splits, order, ranks, engines and resumes cannot change a draw.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

INITIAL = -1
"""The step number of x_T, the latent that denoising starts from."""
SDE_STEPS = -2
"""The step number of the draw that chooses which steps are stochastic (`sde_steps`)."""
TRAIN_STEPS = -3
"""The step number of the draw that chooses which of them are trained on."""

Device = torch.device | str | None


def noise(
    *, seed: int, rollout: int, ids: Sequence[str], step: int, shape: Sequence[int], device: Device = None
) -> Tensor:
    """Standard normal noise, one row per id.  Returns [len(ids), *shape] fp32.

    seed, rollout: integers of at most 64 bits.  ids: sample ids; equal ids get equal rows, so passing group
    ids gives a group one initial latent.  step: the step's index, or `INITIAL`.  Drawn on the CPU and copied
    to `device`, so that every device sees the same bits.

    Source: Philox 4x64 as in numpy, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    drawn = np.empty((len(ids), math.prod(shape)), dtype=np.float32)
    # One generator set to each row's key: building a Philox per row costs more than drawing 1,000 numbers
    # from it.
    bit_generator = np.random.Philox(key=0)
    fresh = bit_generator.state
    generator = np.random.Generator(bit_generator)
    for row, key in enumerate(_keys(seed=seed, rollout=rollout, ids=ids, step=step)):
        fresh["state"]["key"] = key
        bit_generator.state = fresh
        generator.standard_normal(out=drawn[row], dtype=np.float32)
    return torch.as_tensor(drawn.reshape(len(ids), *shape), device=device)


def stream(*, seed: int, rollout: int, label: str, step: int) -> np.random.Philox:
    """The bit stream that belongs to (seed, rollout, label, step)."""
    key = _keys(seed=seed, rollout=rollout, ids=[label], step=step)[0]
    return np.random.Philox(key=key)


def noise_digest(x: Tensor) -> tuple[str, ...]:
    """A short fingerprint of each row, to compare across processes without sending the rows.

    x: [B, ...]; hashed as little-endian fp32 bytes.  Returns B hex strings of 16 characters.
    """
    rows = x.detach().float().cpu().contiguous().numpy().astype("<f4", copy=False)
    return tuple(hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest() for row in rows)


def _keys(*, seed: int, rollout: int, ids: Sequence[str], step: int) -> list[NDArray[np.uint64]]:
    """Philox keys, [2] each."""
    # The numbers have a fixed width, so no two different (seed, rollout, step, id) have the same bytes.
    prefix = hashlib.blake2b(struct.pack("<qqq", seed, rollout, step), digest_size=16)
    keys: list[NDArray[np.uint64]] = []
    for sample_id in ids:
        digest = prefix.copy()
        digest.update(sample_id.encode())
        keys.append(np.frombuffer(digest.digest(), dtype="<u8").astype(np.uint64))
    return keys
