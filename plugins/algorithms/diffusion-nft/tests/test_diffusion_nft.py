"""DiffusionNFT against golden vectors of its formula, and its gradient in closed form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from unirl.algorithms.diffusion_nft.algorithm import DiffusionNft, build
from unirl.algorithms.diffusion_nft.config import DiffusionNftConfig
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.inputs import Inputs
from unirl.core.types.track import LatentSegment, Sampler, Status, Track
from unirl.numerics import forward_process
from unirl.numerics.loss.reduction import reduce_terms, weight_totals

CLEAN, NOISE, SIGMA = (1.0, -1.0), (0.5, 0.25), 0.6
OLD, LIVE = (-0.2, 1.0), (-0.3, 1.1)
ADVANTAGE = 3.0  # optimality 0.8


def make(**settings: Any) -> DiffusionNft:
    return build(
        DiffusionNftConfig(**{"num_points": 1, **settings}),
        advantage=AdvantageConfig(),
        reward_weights={"one": 1.0},
        train=TrainConfig(),
        seed=3,
    )


def make_track(*advantages: float, latents: Tensor | None = None) -> Track:
    rows = len(advantages)
    ids = tuple(f"r0/p/{row}" for row in range(rows))
    segment = LatentSegment(
        latents=torch.tensor([CLEAN] * rows)[:, None] if latents is None else latents,
        positions=torch.full((rows, 1), 2),
        sde_steps=torch.zeros(rows, 0, dtype=torch.int64),
        sigmas=torch.tensor([1.0, 0.5, 0.0]),
        sampler=Sampler(kernel="euler", eta=0.0),
    )
    return Track(
        name="image",
        sample_ids=ids,
        group_ids=("r0/p",) * rows,
        inputs=Inputs.of_texts(("",) * rows),
        metadata=({},) * rows,
        segment=segment,
        advantages=torch.tensor(advantages),
        sample_weights=torch.ones(rows),
        status=(Status.COMPLETED,) * rows,
        policy_version=(0,) * rows,
    )


class Velocities:
    """Given velocities, the same at every point, in place of a model."""

    def __init__(self, live: Tensor, old: Tensor, reference: Tensor | None = None) -> None:
        self.by_policy = {"live": live, "lagged": old, "reference": reference}
        self.points: list[tuple[str, Tensor, Tensor]] = []

    def velocity(self, track: Track, x: Tensor, sigma: Tensor, *, policy: str = "live", guided: bool = False) -> Tensor:
        assert not guided
        self.points.append((policy, x, sigma))
        velocity = self.by_policy[policy]
        assert velocity is not None
        return velocity.expand(x.shape)


def loss_of(algorithm: DiffusionNft, track: Track, forward: Velocities) -> Tensor:
    losses = algorithm.loss(track, forward, progress=0.0)  # type: ignore[arg-type]  # no replay, no decoding
    return reduce_terms(losses.terms, totals=weight_totals(algorithm.loss_weights(track)))


@pytest.fixture
def at_the_golden_point(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "unirl.numerics.forward_process"
    monkeypatch.setattr(f"{module}.forward_noise", lambda **_: torch.tensor([[NOISE]]))
    monkeypatch.setattr(f"{module}.forward_sigmas", lambda **_: torch.tensor([[SIGMA]]))


@pytest.mark.usefixtures("at_the_golden_point")
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"beta": 1.0, "adaptive_weight": False, "scale": 1.0}, 0.01917),
        ({"beta": 1.0, "scale": 1.0}, 0.1309142857),
        ({"beta": 1.0}, 0.6545714286),
        ({"beta": 0.1, "adaptive_weight": False, "scale": 1.0}, 0.26298),
        ({"beta": 0.1, "scale": 1.0}, 1.6279523337),
        ({"beta": 0.1}, 8.1397616683),
    ],
)
def test_golden_vectors(settings: dict[str, Any], expected: float) -> None:
    """Computed in fp64 from the formula, independently of this code."""
    result = loss_of(make(**settings), make_track(ADVANTAGE), Velocities(torch.tensor(LIVE), torch.tensor(OLD)))
    assert float(result) == pytest.approx(expected, rel=1e-6)


@pytest.mark.usefixtures("at_the_golden_point")
def test_the_penalty_is_the_squared_distance_to_the_reference() -> None:
    velocities = Velocities(torch.tensor(LIVE), torch.tensor(OLD), torch.tensor((0.1, 1.0)))
    plain, penalised = (loss_of(make(kl_coef=kl), make_track(ADVANTAGE), velocities) for kl in (0.0, 2.0))
    assert float(penalised - plain) == pytest.approx(2.0 * (0.4**2 + 0.1**2) / 2, rel=1e-5)


@pytest.mark.usefixtures("at_the_golden_point")
@pytest.mark.parametrize("beta", [0.1, 1.0, 2.0])
@pytest.mark.parametrize("advantage", [3.0, -4.0, 0.0, 7.0])
def test_where_both_policies_agree_the_gradient_is_that_of_the_formula(beta: float, advantage: float) -> None:
    """(2r - 1) 2 sigma^2 (v_old - v*) / D for any beta, with r from the clipped advantage and v* = x1 - x0."""
    old = torch.tensor(OLD, dtype=torch.float64)
    live = old.clone().requires_grad_()
    algorithm = make(beta=beta, adaptive_weight=False, scale=1.0)
    loss_of(algorithm, make_track(advantage), Velocities(live, old)).backward()
    optimality = min(max(advantage, -5.0), 5.0) / 10 + 0.5
    target = torch.tensor(NOISE, dtype=torch.float64) - torch.tensor(CLEAN, dtype=torch.float64)
    expected = (2 * optimality - 1) * 2 * SIGMA**2 * (old - target) / 2
    assert live.grad is not None
    # Points are fp32.
    torch.testing.assert_close(live.grad, expected, rtol=1e-5, atol=1e-7)


def test_one_step_towards_clean_latents_is_flow_matching(monkeypatch: pytest.MonkeyPatch) -> None:
    """With r = 1, beta 1 and no adaptive weight the loss is sigma^2 times the error of the velocity."""
    module = "unirl.numerics.forward_process"
    monkeypatch.setattr(f"{module}.forward_noise", lambda **_: torch.tensor([[NOISE]]))
    monkeypatch.setattr(f"{module}.forward_sigmas", lambda **_: torch.tensor([[SIGMA]]))
    algorithm = make(beta=1.0, adaptive_weight=False, scale=1.0)
    loss = loss_of(algorithm, make_track(5.0), Velocities(torch.tensor(LIVE), torch.tensor(OLD)))
    error = sum((v - (one - zero)) ** 2 for v, one, zero in zip(LIVE, NOISE, CLEAN, strict=True)) / 2
    assert float(loss) == pytest.approx(SIGMA**2 * error, rel=1e-5)


def test_points_are_those_of_the_forward_process_of_each_sample() -> None:
    latents = torch.randn(3, 1, 4, 2, generator=torch.Generator().manual_seed(0))
    track = make_track(1.0, -1.0, 2.0, latents=latents)
    velocities = Velocities(torch.zeros(4, 2), torch.zeros(4, 2))
    algorithm = make(num_points=5)
    algorithm.loss(track, velocities, progress=0.0)  # type: ignore[arg-type]
    algorithm.loss(track.select([2]), velocities, progress=0.0)  # type: ignore[arg-type]
    (live, x, sigma), (lagged, other, _), (_, alone, alone_sigma), _ = velocities.points
    assert (live, lagged) == ("live", "lagged") and torch.equal(x, other)
    assert torch.equal(alone, x[[2]]) and torch.equal(alone_sigma, sigma[[2]])
    noise = forward_process.forward_noise(seed=3, ids=track.sample_ids, draws=5, shape=(4, 2))
    level = sigma[:, :, None, None]
    torch.testing.assert_close(x, (1 - level) * latents + level * noise)
    assert algorithm.loss_weights(track)["policy"].shape == (3, 5)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["sampling.guidance_scale=2"], "sampling.guidance_scale: got 2.0, expected 1"),
        (
            ["sampling.kernel=flow-sde", "sampling.eta=0.7", "sampling.sde={mode: all, train_fraction: 0.5}"],
            "sampling.sde.train_fraction: got 0.5, expected 1",
        ),
        (
            ["algorithm.point_range=[0.9,0.1]"],
            "algorithm.point_range: got [0.9, 0.1], expected two rising quantiles",
        ),
        (
            ["backend.lagged.kind=none"],
            "backend.lagged.kind: got none, but algorithm 'diffusion-nft' trains on samples",
        ),
    ],
)
def test_settings_that_have_no_meaning_here_are_refused(overrides: list[str], says: str) -> None:
    catalog = Catalog.discover()
    plan = compose("quickstart-nft", overrides, catalog=catalog)
    (reason,) = match(plan, catalog=catalog).reasons
    assert str(reason).startswith(says)
