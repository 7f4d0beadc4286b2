"""Two ranks that share the tokens of a video, or shards of two experts, compute what one process does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from wan_pipelines import frames_of
from wan_ranks import SIGMAS, from_frame, of_experts, sharded_rank, split_rank

pytestmark = pytest.mark.slow


def on_two_ranks(work: Callable[..., None], *arguments: object) -> None:
    # Not "spawn": its processes end by finalizing their interpreter, which threads of gloo do not always survive.
    torch.multiprocessing.start_processes(work, arguments, nprocs=2, start_method="forkserver")


def assert_close(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, gradient in expected.items():
        # Sums of two ranks in another order: a few spacings of fp32 numbers of the largest element.
        scale = float(gradient.abs().max()) or 1.0
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-5 * scale, msg=lambda m, n=name: n + m)


def test_ranks_of_a_sequence_have_the_velocity_and_the_gradients_of_one_process_features_of_the_frame_included(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tiny("wan21-i2v")
    frames_of(tmp_path, [1, 2])
    on_two_ranks(split_rank, folder, tmp_path, str(tmp_path / "store"))
    velocity, gradients = torch.load(tmp_path / "store.pt")
    expected, alone = from_frame(folder, tmp_path, is_split=False)
    # Attention over the same tokens in another split: fp32 rounding of a forward, in velocities of order 1.
    torch.testing.assert_close(velocity, expected, rtol=0, atol=1e-5)
    assert gradients.keys() == alone.keys()
    assert_close(gradients, alone)


def test_ranks_that_need_other_experts_have_the_gradients_of_one_process(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """And none waits for the other."""
    folder = tiny("wan22")
    on_two_ranks(sharded_rank, folder, str(tmp_path / "store"))
    sharded, alone = torch.load(tmp_path / "store.pt"), of_experts(folder, [0, 1], is_sharded=False)
    for sigmas, result, expected in zip(SIGMAS, sharded, alone, strict=True):
        used = {"transformer" if sigma >= 0.875 else "transformer_2" for sigma in sigmas}
        assert {name.partition(".")[0] for name in expected} == used
        assert_close(result, expected)
        assert all(bool((result[name] == 0).all()) for name in result.keys() - expected.keys())
