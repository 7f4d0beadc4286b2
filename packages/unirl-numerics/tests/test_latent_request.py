"""What a request says of its latents before anything is sampled."""

from __future__ import annotations

import pytest
import torch
from unirl.core.types.request import LatentRequest
from unirl.core.types.sampling import LatentSamplingConfig, SdeStepsConfig
from unirl.core.types.serial import from_bytes, to_bytes
from unirl.numerics.diffusion.request import plan_latents
from unirl.numerics.noise import INITIAL, noise, noise_digest

IDS = ("a/0", "a/1", "b/0", "b/1")
GROUPS = ("a", "a", "b", "b")
SHAPE = (2, 4, 4)


def digests(rollout: int, *, ids: tuple[str, ...] = IDS, groups: tuple[str, ...] = GROUPS, same: bool = False):
    planned = plan_latents(
        LatentSamplingConfig(same_initial_noise=same),
        sigmas=torch.linspace(1, 0, 11),
        latent_shape=SHAPE,
        seed=7,
        rollout=rollout,
        sample_ids=ids,
        group_ids=groups,
    )
    return planned.initial_noise


@pytest.mark.parametrize("same", [False, True])
def test_two_rows_prove_their_noise_in_each_rollout_and_every_row_does_in_time(same: bool) -> None:
    seen: set[int] = set()
    for rollout in range(len(IDS) - 1):
        drawn = noise(seed=7, rollout=rollout, ids=GROUPS if same else IDS, step=INITIAL, shape=SHAPE)
        expected, result = noise_digest(drawn), digests(rollout, same=same)
        stated = {row for row, digest in enumerate(result) if digest}
        assert len(stated) == 2 and 0 in stated
        assert all(result[row] == expected[row] for row in stated)
        seen |= stated
    assert seen == set(range(len(IDS)))


def test_trained_steps_travel_where_they_are_not_all() -> None:
    def planned(fraction: float, rollout: int = 0) -> LatentRequest:
        sde = SdeStepsConfig(mode="fraction", last=0.9, train_fraction=fraction)
        return plan_latents(
            LatentSamplingConfig(sde=sde),
            sigmas=torch.linspace(1, 0, 11),
            latent_shape=SHAPE,
            seed=7,
            rollout=rollout,
            sample_ids=IDS,
            group_ids=GROUPS,
        )

    every, some = planned(1.0), planned(0.6)
    assert every.train_steps is None and every.scored_steps is every.sde_steps
    assert torch.equal(some.sde_steps, every.sde_steps) and some.scored_steps is some.train_steps
    assert some.train_steps is not None and some.train_steps.shape == (4, 5)
    assert torch.equal(some.select([2, 3]).scored_steps, some.train_steps[2:])
    assert not torch.equal(some.train_steps, planned(0.6, 1).scored_steps)
    assert torch.equal(from_bytes(to_bytes(some), LatentRequest).train_steps, some.train_steps)
    assert from_bytes(to_bytes(every), LatentRequest).train_steps is None


def test_a_single_row_proves_its_own_and_no_row_none() -> None:
    (drawn,) = noise_digest(noise(seed=7, rollout=5, ids=IDS[:1], step=INITIAL, shape=SHAPE))
    assert digests(5, ids=IDS[:1], groups=GROUPS[:1]) == (drawn,)
    assert digests(5, ids=(), groups=()) == ()
