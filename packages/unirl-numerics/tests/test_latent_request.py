"""What a request says of its latents before anything is sampled."""

from __future__ import annotations

import pytest
import torch
from unirl.core.config import LatentSamplingConfig
from unirl.numerics.latent_request import plan_latents
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
        wanted, found = noise_digest(drawn), digests(rollout, same=same)
        stated = {row for row, digest in enumerate(found) if digest}
        assert len(stated) == 2 and 0 in stated
        assert all(found[row] == wanted[row] for row in stated)
        seen |= stated
    assert seen == set(range(len(IDS)))


def test_a_single_row_proves_its_own_and_no_row_none() -> None:
    (drawn,) = noise_digest(noise(seed=7, rollout=5, ids=IDS[:1], step=INITIAL, shape=SHAPE))
    assert digests(5, ids=IDS[:1], groups=GROUPS[:1]) == (drawn,)
    assert digests(5, ids=(), groups=()) == ()
