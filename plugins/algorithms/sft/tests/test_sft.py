"""Flow-matching regression by its formula."""

from __future__ import annotations

import pytest
import torch
from forward_points import Velocities, at_points, clean_track
from unirl.algorithms.sft.algorithm import build
from unirl.algorithms.sft.config import SftConfig
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.numerics.loss.reduction import reduce_terms, weight_totals


def test_the_loss_is_the_mean_squared_error_of_the_velocity(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its gradient 2 (v - v*) / (D n k)."""
    noise = torch.tensor([[[0.5, 0.25], [-1.0, 2.0]], [[0.0, 0.0], [1.0, 1.0]]])
    at_points(monkeypatch, noise=noise, sigma=torch.tensor([[0.25, 0.75]] * 2))
    clean = torch.tensor([[1.0, -1.0], [0.5, 2.0]])
    algorithm = build(
        SftConfig(num_points=2, point_levels="uniform"),
        advantage=AdvantageConfig(),
        reward_weights={},
        train=TrainConfig(),
        seed=0,
    )
    track, live = clean_track(clean), torch.tensor([0.3, -0.2]).repeat(2, 2, 1).requires_grad_()
    forward = Velocities({"live": live})
    losses = algorithm.loss(track, forward, progress=0.0)
    loss = reduce_terms(losses.terms, totals=weight_totals(algorithm.loss_weights(track)))
    difference = live.detach() - (noise - clean[:, None])
    # One fp32 rounding of each of eight squares of order 1.
    torch.testing.assert_close(loss.detach(), difference.double().square().mean(), rtol=1e-6, atol=0)
    loss.backward()
    torch.testing.assert_close(live.grad, 2 * difference / 8, rtol=1e-6, atol=0)
    level = torch.tensor([0.25, 0.75])[:, None]
    torch.testing.assert_close(forward.asked[0][1], (1 - level) * clean[:, None] + level * noise)
