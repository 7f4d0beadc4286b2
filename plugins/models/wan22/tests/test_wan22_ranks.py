"""Ranks that share sharded experts and need other ones: none waits for the other, and gradients are those of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from wan22_ranks import SIGMAS, gradients, rank


@pytest.mark.slow
def test_two_ranks_with_other_experts_have_the_gradients_of_one_process(tiny_folder: Path, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(rank, (str(tiny_folder), str(tmp_path / "store")), nprocs=2)
    sharded = torch.load(tmp_path / "store.pt")
    alone = gradients(tiny_folder, SIGMAS, [0, 1], is_sharded=False)
    for sigmas, result, expected in zip(SIGMAS, sharded, alone, strict=True):
        used = {"transformer" if sigma >= 0.875 else "transformer_2" for sigma in sigmas}
        assert {name.partition(".")[0] for name in expected} == used
        for name, gradient in expected.items():
            # Sums of two rows in another order: a few spacings of fp32 numbers of the largest element.
            scale = float(gradient.abs().max()) or 1.0
            torch.testing.assert_close(result[name], gradient, rtol=0, atol=1e-5 * scale)
        assert all(bool((result[name] == 0).all()) for name in result.keys() - expected.keys())
