"""Latent requests, as planned before anything is sampled."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from unirl.core.types.batch import same
from unirl.core.types.request import LatentRequest
from unirl.core.types.sampling import LatentSamplingConfig, SdeStepsConfig
from unirl.core.types.serial import from_bytes, to_bytes
from unirl.numerics.diffusion.request import plan_latents, sde_steps_of
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


def test_a_request_shares_noise_and_steps_within_a_group() -> None:
    sampling = LatentSamplingConfig(
        num_inference_steps=4, same_initial_noise=True, sde=SdeStepsConfig(mode="random", count=2, per_group=True)
    )
    ids = tuple(f"{group}/{number}" for group in "abcdefgh" for number in range(2))
    request = plan_latents(
        sampling,
        sigmas=torch.linspace(1, 0, 5),
        latent_shape=(4, 2, 2),
        seed=0,
        rollout=3,
        sample_ids=ids,
        group_ids=tuple(i[0] for i in ids),
    )
    assert request.noise_ids == tuple(i[0] for i in ids)
    pairs = request.sde_steps.view(8, 2, 2)
    assert torch.equal(pairs[:, 0], pairs[:, 1]), "the samples of a group share their steps"
    assert len({tuple(row) for row in pairs[:, 0].tolist()}) > 1, "groups draw their own"


def test_a_request_asks_for_clean_latents_alone() -> None:
    request = plan_latents(
        LatentSamplingConfig(kernel="flow-sde", eta=0.7, sde=SdeStepsConfig(mode="all")),
        sigmas=torch.tensor([1.0, 0.5, 0.0]),
        latent_shape=(2,),
        seed=1,
        rollout=0,
        sample_ids=("a", "b"),
        group_ids=("g", "g"),
        trajectory="none",
    )
    assert request.sde_steps.tolist() == [[0, 1], [0, 1]], "samples are made as the recipe says"
    assert request.scored_steps.shape == (2, 0) and request.keep.shape == (2, 0)


def test_a_full_trajectory_keeps_every_position_and_a_window_none() -> None:
    def keep(trajectory: Literal["window", "full"]) -> list[list[int]]:
        return plan_latents(
            LatentSamplingConfig(),
            sigmas=torch.linspace(1, 0, 5),
            latent_shape=SHAPE,
            seed=7,
            rollout=0,
            sample_ids=IDS[:2],
            group_ids=GROUPS[:2],
            trajectory=trajectory,
        ).keep.tolist()

    assert keep("full") == [[0, 1, 2, 3, 4]] * 2 and keep("window") == [[], []]


@pytest.mark.parametrize("sde", [SdeStepsConfig(mode="random", count=3), SdeStepsConfig(mode="window", window=2)])
def test_a_plan_is_a_pure_function_of_its_arguments(sde: SdeStepsConfig) -> None:
    def planned(rollout: int) -> LatentRequest:
        return plan_latents(
            LatentSamplingConfig(sde=sde),
            sigmas=torch.linspace(1, 0, 11),
            latent_shape=SHAPE,
            seed=7,
            rollout=rollout,
            sample_ids=IDS,
            group_ids=GROUPS,
        )

    torch.manual_seed(1)
    first, state = planned(4), torch.get_rng_state()
    planned(9)
    torch.manual_seed(2)
    assert same(planned(4), first)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state), "the global generator has not moved"


@pytest.mark.parametrize("settings", [{"mode": "window"}, {"mode": "window", "overlap": 3}, {"mode": "random"}])
def test_possible_steps_are_those_that_rollouts_draw(settings: dict[str, Any]) -> None:
    for last, strategy in ((1.0, "progressive"), (0.75, "progressive"), (1.0, "random"), (0.75, "random")):
        sde = SdeStepsConfig(**{**settings, "count": 2, "last": last, "strategy": strategy, "move_every": 1})
        drawn = [
            sde_steps_of(sde, num_steps=11, rollout=rollout, group_ids=["a"], seed=3).flatten().tolist()
            for rollout in range(120)
        ]
        assert sde.possible_steps(11) == sorted({step for steps in drawn for step in steps})
