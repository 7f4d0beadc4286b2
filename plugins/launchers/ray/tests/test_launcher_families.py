"""Algorithms of every family on several ranks and with workers apart: the numbers of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
from launched import BAR, RANKS, SEPARATE, assert_same_run
from small_runs import EVALUATED, SMALL, SMALL_DRAFT, SMALL_TEXT, events, run, steps, tensors

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

JUDGED = ("loss", "critic_loss", "critic_grad_norm", "explained_variance", "returns_mean", "reward_mean", "kl")

Here = Callable[..., Path]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Here:
    """`here(recipe, *words)`: the folder of a run in one process, which tests of several launchers share."""

    @cache
    def run_here(recipe: str, *words: str, small: Sequence[str] = SMALL) -> Path:
        return run(tmp_path_factory.mktemp("here"), "launcher=local", *words, recipe=recipe, small=small).folder

    return run_here


@pytest.mark.parametrize("way", [RANKS[1], SEPARATE], ids=["one-rank", "separate"])
def test_rollouts_of_workers_come_from_the_lagged_policy(
    way: Sequence[str], tmp_path: Path, ray_here: None, here: Here
) -> None:
    words = (
        *EVALUATED, "run.max_steps=3", "eval.every=2", "backend.eps=1e-3", "backend.lr=1e-3",
        "backend.lagged.kind=constant", "backend.lagged.decay=0.75",
    )  # fmt: skip
    folders = here("quickstart-nft", *words), run(tmp_path / "run", *words, *way, recipe="quickstart-nft").folder
    expected, result = (steps(folder) for folder in folders)
    for step in (1, 2, 3):
        for key in ("reward_mean", "loss", "velocity_shift"):
            assert result[step][key] == pytest.approx(expected[step][key], rel=1e-4, abs=BAR), (step, key)
    scores = [[e["metrics"]["score_mean"] for e in events(folder, "evaluated")] for folder in folders]
    assert scores[1] == pytest.approx(scores[0], rel=0, abs=1e-5)


GUIDED = (
    "algorithm=velocity-distillation", "backend.reference_copy=true", "+stages.image.reference_guidance=3.5",
    "sampling.guidance_mode='unirl.algorithms.distillation.guidance:WithNegatives'",
)  # fmt: skip
LOSSES = {
    "awm": ("quickstart-awm", (), SMALL),
    "diffusion-dpo": ("quickstart-dpo", ("algorithm.pairs_per_group=2",), SMALL),
    "dgpo": ("quickstart-dgpo", (), SMALL),
    "velocity-distillation": ("quickstart", GUIDED, SMALL),
    "distillation": ("quickstart-distillation", (), SMALL_TEXT),
    "dpo": ("quickstart-text-dpo", (), SMALL_TEXT),
}


@pytest.mark.parametrize("algorithm", LOSSES)
def test_losses_of_every_family_are_those_of_one_process(algorithm: str, tmp_path: Path, ray_here: None) -> None:
    """The forward process draws its points by sample, a pair stays on one rank, and every rank has its teacher, with its
    guidance. Gradients of rewards and critics are tested separately here, policy gradients
    in test_launchers.py."""
    recipe, words, small = LOSSES[algorithm]
    at = "backend.student" if recipe == "quickstart-distillation" else "backend"
    words = ("run.max_steps=2", f"{at}.eps=1", f"{at}.lr=1e-2", *words)
    ways = {"here": ("launcher=local",), "there": RANKS[2]}
    here, there = (
        steps(run(tmp_path / name, *words, *how, recipe=recipe, small=small).folder) for name, how in ways.items()
    )
    for step in (1, 2):
        assert here[step]["grad_norm"] > 0
        for key in ("reward_mean", "loss", "grad_norm"):
            assert there[step][key] == pytest.approx(here[step][key], rel=1e-4, abs=BAR), (step, key)


@pytest.mark.parametrize("way", [RANKS[2], SEPARATE], ids=["two-ranks", "separate"])
def test_rewards_are_backpropagated_on_the_ranks_that_train(
    way: Sequence[str], tmp_path: Path, ray_here: None, here: Here
) -> None:
    """Through stochastic steps, whose noise is that of the rollout, and through three forwards of the same weights."""
    words = (
        "run.max_steps=2", "backend.eps=1", "backend.lr=1e-2", "algorithm.gradient_steps=3",
        "sampling.kernel=flow-sde", "sampling.eta=0.5", "sampling.sde={mode: all}",
    )  # fmt: skip
    folder = here("quickstart-draft", *words, small=SMALL_DRAFT)
    expected, result = (
        steps(folder),
        steps(run(tmp_path / "run", *words, *way, recipe="quickstart-draft", small=SMALL_DRAFT).folder),
    )
    (start,) = events(folder, "run_started")
    assert start["predicted"] == {}, "the cost of a replay is predicted for a loss that replays nothing"
    for step in (1, 2):
        for key in ("reward_mean", "loss", "grad_norm", "reward/shapes"):
            assert result[step][key] == pytest.approx(expected[step][key], rel=1e-4, abs=BAR), (step, key)
        # Stored noise is added as (x' - mean) + mean, of latents below 10: two roundings in each of three steps. Other
        # batches add their sums in another order, which the network carries on.
        assert result[step]["latent_mismatch_max"] <= 1e-3
        assert expected[step]["reward_recomputed"] == pytest.approx(expected[step]["reward_mean"], rel=1e-4)


def test_a_critic_on_two_ranks_is_that_of_one_process(tmp_path: Path, ray_here: None) -> None:
    """PPO over texts: the ranks whiten advantages together, and step policy and critic alike."""
    words = (
        "algorithm=ppo", "run.max_steps=2", "run.save_every=1", "algorithm.kl_coef=0.1", "backend.reference_copy=true",
        # With eps 1 a step of Adam is linear in the gradient, which ranks add up in another order.
        "backend.eps=1", "backend.lr=1e-2", "backend.critic.lr=1e-2",
    )  # fmt: skip
    ways = {"here": ("launcher=local",), "there": RANKS[2]}
    result = {
        name: run(tmp_path / name, *words, *way, recipe="quickstart-text", small=SMALL_TEXT).folder
        for name, way in ways.items()
    }
    assert_same_run(result["here"], result["there"], within=BAR, last=2, numbers=JUDGED)
    assert any(name.startswith("critic/") for name in tensors(result["there"], 2))
