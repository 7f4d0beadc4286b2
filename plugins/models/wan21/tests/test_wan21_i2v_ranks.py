"""Two ranks that share the tokens of a video from a first frame compute what one does, features of the frame included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from wan21_i2v_ranks import computed, rank
from wan_first_frames import frames_of


@pytest.mark.slow
def test_two_ranks_of_a_sequence_have_the_velocity_and_the_gradients_of_one_process(
    i2v_folder: Path, tmp_path: Path
) -> None:
    frames_of(tmp_path, [1, 2])
    arguments = (str(i2v_folder), str(tmp_path), str(tmp_path / "store"))
    torch.multiprocessing.spawn(rank, arguments, nprocs=2)
    velocity, gradients = torch.load(tmp_path / "store.pt")
    expected, alone = computed(i2v_folder, tmp_path, is_split=False)
    # Attention over the same tokens in another split: fp32 rounding of a forward, in velocities of order 1.
    torch.testing.assert_close(velocity, expected, rtol=0, atol=1e-5)
    assert gradients.keys() == alone.keys()
    for name, gradient in alone.items():
        # Sums of two ranks' tokens in another order: a few spacings of fp32 numbers of the largest element.
        scale = float(gradient.abs().max()) or 1.0
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-5 * scale, msg=lambda m, n=name: n + m)
