"""Losses over the ELBO of final samples, against each other: where two of them are one, and what all have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from forward_points import Velocities, at_points, clean_track
from torch import Tensor
from unirl.algorithms.awm.algorithm import build as build_awm
from unirl.algorithms.awm.config import AwmConfig
from unirl.algorithms.crd.algorithm import build as build_crd
from unirl.algorithms.crd.config import CrdConfig
from unirl.algorithms.dgpo.algorithm import build as build_dgpo
from unirl.algorithms.dgpo.config import DgpoConfig
from unirl.algorithms.diffusion_dpo.algorithm import build as build_diffusion_dpo
from unirl.algorithms.diffusion_dpo.config import DiffusionDpoConfig
from unirl.algorithms.diffusion_nft.algorithm import build as build_diffusion_nft
from unirl.algorithms.diffusion_nft.config import DiffusionNftConfig
from unirl.algorithms.epg.algorithm import build as build_epg
from unirl.algorithms.epg.config import EpgConfig
from unirl.core.roles import Algorithm
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.numerics.loss.reduction import reduce_terms, weight_totals

SIGMA = 0.4
# Not normalized, so that centred rewards are the advantages.
CONTEXT: dict[str, Any] = {
    "advantage": AdvantageConfig(normalize=False),
    "reward_weights": {"one": 1.0},
    "train": TrainConfig(),
    "seed": 3,
}
EQUAL = 1e-5
"""Velocities are fp32, and so are gradients."""


@pytest.fixture(autouse=True)
def at_one_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all samples of a group, as the losses over groups share it."""
    at_points(monkeypatch, noise=torch.tensor([[[0.3, -0.2, 0.1]]]), sigma=torch.full((1, 1), SIGMA))


def velocities(rows: int, *, seed: int) -> Tensor:
    return torch.randn(rows, 1, 3, generator=torch.Generator().manual_seed(seed))


def loss_and_gradient(
    algorithm: Algorithm, rewards: Sequence[float], *, live: Tensor, others: Tensor
) -> tuple[float, Tensor]:
    """The loss over one group and its gradient in the live velocities. others: those of every other policy, and of the
    one that sampled."""
    track = clean_track(velocities(len(rewards), seed=5)[:, 0])
    track = dataclasses.replace(track, reward_parts={"one": torch.tensor(rewards)})
    track = algorithm.advantages(track)[0]
    track = algorithm.with_old_log_probs(track, Velocities({"live": others}))
    leaf = live.clone().requires_grad_()
    forward = Velocities({"live": leaf, "reference": others, "lagged": others})
    losses = algorithm.loss(track, forward, progress=0.0)
    loss = reduce_terms(losses.terms, totals=weight_totals(algorithm.loss_weights(track)))
    loss.backward()
    assert leaf.grad is not None
    return float(loss.detach()), leaf.grad


@pytest.mark.parametrize("beta", [0.5, 3.0])
def test_dgpo_of_two_samples_with_opposite_unit_advantages_is_diffusion_dpo(beta: float) -> None:
    """With the same beta."""
    dgpo = build_dgpo(DgpoConfig(num_points=1, beta=beta), **CONTEXT)
    dpo = build_diffusion_dpo(DiffusionDpoConfig(num_points=1, beta=beta), **CONTEXT)
    at = {"live": velocities(2, seed=1), "others": velocities(2, seed=2)}
    (one, slope), (other, expected) = (loss_and_gradient(part, [-1.0, 1.0], **at) for part in (dgpo, dpo))
    assert one == pytest.approx(other, rel=EQUAL)
    torch.testing.assert_close(slope, expected, rtol=EQUAL, atol=0)


def test_crd_of_two_samples_is_the_squared_error_of_their_margin() -> None:
    """IPO, arXiv 2310.12036: half the difference of implied rewards on half that of the rewards."""
    crd = build_crd(CrdConfig(num_points=1, beta=2.0, weighting="uniform"), **CONTEXT)
    live, others = velocities(2, seed=1), velocities(2, seed=2)
    loss, _ = loss_and_gradient(crd, [0.2, 0.9], live=live, others=others)
    target = torch.tensor([[[0.3, -0.2, 0.1]]]) - velocities(2, seed=5)
    gain = ((others - target).square() - (live - target).square()).mean(dim=(1, 2))
    assert loss == pytest.approx(float((2.0 * (gain[1] - gain[0]) - 0.7) / 2) ** 2, rel=EQUAL)


@pytest.mark.parametrize("moved", [False, True])
def test_epg_is_awm_without_a_clip(moved: bool) -> None:
    """Of the same ELBO; after updates as well, where the clip of AWM binds nowhere."""
    epg = build_epg(EpgConfig(num_points=1, form="epg", weighting="uniform"), **CONTEXT)
    awm = build_awm(AwmConfig(num_points=1, clip_range=1.0), **CONTEXT)
    live = velocities(3, seed=1)
    others = live + 0.1 * velocities(3, seed=2) if moved else live
    rewards = [0.1, 0.5, 0.6]
    (one, slope), (other, expected) = (
        loss_and_gradient(part, rewards, live=live, others=others) for part in (epg, awm)
    )
    assert one == pytest.approx(other, rel=EQUAL)
    torch.testing.assert_close(slope, expected, rtol=EQUAL, atol=1e-8)


# Name -> algorithm, and the factor of its gradient in -A_i times that of the ELBO.
FIRST: dict[str, tuple[Algorithm, float]] = {
    "epg": (build_epg(EpgConfig(num_points=1, form="epg", weighting="uniform", elbo_scale=7.0), **CONTEXT), 7.0),
    "pepg": (build_epg(EpgConfig(num_points=1, form="pepg", weighting="uniform", elbo_scale=7.0), **CONTEXT), 7.0),
    "par": (build_epg(EpgConfig(num_points=1, form="par", weighting="uniform", elbo_scale=7.0), **CONTEXT), 7.0),
    "dgpo": (build_dgpo(DgpoConfig(num_points=1, beta=7.0), **CONTEXT), 7.0 / 2),
    "crd": (build_crd(CrdConfig(num_points=1, beta=7.0, weighting="uniform"), **CONTEXT), 2 * 7.0),
    # In errors of the clean estimate, and advantages over their clip.
    "diffusion-nft": (
        build_diffusion_nft(
            DiffusionNftConfig(num_points=1, beta=0.3, adaptive_weight=False, advantage_clip=2.0, scale=7.0), **CONTEXT
        ),
        7.0 * SIGMA**2 / 2.0,
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_at_the_policy_that_it_is_compared_with_every_loss_is_advantage_weighted_matching(name: str) -> None:
    """Its gradient is that of awm, up to a factor."""
    algorithm, factor = FIRST[name]
    live, rewards = velocities(3, seed=1), [0.1, 0.5, 0.6]
    _, slope = loss_and_gradient(algorithm, rewards, live=live, others=live)
    awm = build_awm(AwmConfig(num_points=1), **CONTEXT)
    _, expected = loss_and_gradient(awm, rewards, live=live, others=live)
    assert float(expected.abs().min()) > 0
    torch.testing.assert_close(slope, factor * expected, rtol=EQUAL, atol=0)


def test_with_the_adaptive_weight_the_first_gradient_of_epg_is_that_of_diffusion_nft() -> None:
    """With its defaults, a scale of 5 and a clip of 5."""
    epg = build_epg(EpgConfig(num_points=1), **CONTEXT)
    nft = build_diffusion_nft(DiffusionNftConfig(num_points=1), **CONTEXT)
    live, rewards = velocities(3, seed=1), [0.1, 0.5, 0.6]
    (_, slope), (_, expected) = (loss_and_gradient(part, rewards, live=live, others=live) for part in (epg, nft))
    torch.testing.assert_close(slope, expected, rtol=EQUAL, atol=0)
