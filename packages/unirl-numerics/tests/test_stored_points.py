"""Points of stored trajectories."""

import dataclasses

import pytest
import torch
from unirl.core.errors import BatchError
from unirl.core.types.track import LatentSegment, Sampler
from unirl.numerics.diffusion.stored_points import stored_points
from unirl.numerics.forward_config import ForwardConfig

STEPS = 10
IDS = tuple(f"r0/p/{row}" for row in range(400))


def segment(rows=400):
    """Position k is stored at slot STEPS - k, and its latent is k."""
    positions = torch.arange(STEPS, -1, -1).expand(rows, -1)
    return LatentSegment(
        latents=positions[:, :, None].float(),
        positions=positions,
        sde_steps=torch.zeros(rows, 0, dtype=torch.int64),
        sigmas=1 - torch.arange(STEPS + 1) / STEPS,
        sampler=Sampler(kernel="euler", eta=0.0),
    )


def test_points_are_latents_with_their_levels_one_in_each_part():
    x, sigma = stored_points(segment(), ForwardConfig(num_points=5), seed=1, ids=IDS)
    position = x[:, :, 0]
    # Levels are fp32 of tenths.
    torch.testing.assert_close(sigma, 1 - position / STEPS, rtol=0, atol=1e-6)
    # From clean to noise, two steps in each part, each as often.
    for part in range(5):
        steps = {STEPS - 1 - 2 * part, STEPS - 2 - 2 * part}
        assert set(position[:, part].tolist()) == steps
        # Of 400 draws, half: 200 with a standard deviation of 10, five times.
        assert 150 < int((position[:, part] == min(steps)).sum()) < 250


def test_a_range_leaves_out_its_ends_of_the_schedule():
    x, _ = stored_points(segment(), ForwardConfig(num_points=2, point_range=[0.2, 0.5]), seed=1, ids=IDS)
    # The third to the fifth step from the clean end: positions 7, 6 and 5.
    assert set(x.flatten().tolist()) == {7.0, 6.0, 5.0}


def test_points_depend_on_the_sample_and_the_seed_alone():
    config = ForwardConfig(num_points=3)
    x, _ = stored_points(segment(), config, seed=1, ids=IDS)
    some, _ = stored_points(segment(2), config, seed=1, ids=(IDS[7], IDS[2]))
    assert torch.equal(some, x[[7, 2]])
    assert not torch.equal(stored_points(segment(), config, seed=2, ids=IDS)[0], x)


def test_a_position_that_is_not_stored_is_refused():
    whole = segment(2)
    short = dataclasses.replace(whole, latents=whole.latents[:, :5], positions=whole.positions[:, :5])
    with pytest.raises(BatchError, match="row 0 has no stored latents at position 5, stored are"):
        stored_points(short, ForwardConfig(num_points=10), seed=1, ids=IDS[:2])
