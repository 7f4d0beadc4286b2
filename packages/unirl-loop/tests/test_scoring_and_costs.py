"""Scores are checked before they become rewards; costs follow their formulas."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import pytest
import torch
from unirl.core.errors import RewardFailed
from unirl.core.roles import ScoreInput, Scores
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.core.types.request import LatentRequest
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.core.types.track import Conditions, Status, Track
from unirl.loop.costs import Speed, latent_step_cost, peak_tflops_of, track_bytes
from unirl.loop.scoring import MediaScore, agreements, constant_reward, score


def make_track(rows: int = 4) -> Track:
    return Track(
        name="image",
        sample_ids=tuple(f"p/{row}" for row in range(rows)),
        group_ids=("p",) * rows,
        inputs=Inputs.of_texts([f"prompt {row}" for row in range(rows)]),
        metadata=({},) * rows,
        media=Media(kind="image", values=torch.zeros(rows, 3, 2, 2)),
        sample_weights=torch.ones(rows),
        status=(Status.COMPLETED,) * rows,
        policy_version=(0,) * rows,
    )


class Given:
    """A reward that gives what it was given."""

    def __init__(self, *values: float, parts: Mapping[str, list[float]] | None = None) -> None:
        self._scores = Scores(
            values=torch.tensor(values), parts={name: torch.tensor(v) for name, v in (parts or {}).items()}
        )

    def score(self, samples: ScoreInput) -> Scores:
        return self._scores

    def close(self) -> None: ...


def test_the_reward_is_the_weighted_sum_and_parts_keep_their_names() -> None:
    rewards = {"a": Given(0, 1, 0, 1, parts={"colour": [1, 1, 0, 0]}), "b": Given(10, 20, 30, 40)}
    track = score(make_track(), rewards, {"a": 1.0, "b": 0.5})
    assert track.rewards is not None
    assert track.rewards.tolist() == [5, 11, 15, 21]
    assert sorted(track.reward_parts) == ["a", "a/colour", "b"]


def test_agreement_counts_the_pairs_of_a_group_that_both_rewards_tell_apart() -> None:
    track = dataclasses.replace(make_track(6), group_ids=("p", "p", "p", "p", "q", "q"))
    rewards = {"a": Given(0, 1, 2, 2, 5, 0, parts={"x": [0.0] * 6}), "b": Given(0, 2, 1, 3, 0, 0), "c": Given(*[7] * 6)}
    found = agreements(score(track, rewards, {"a": 1.0, "b": 0.0, "c": 0.0}))
    # By hand: a orders 5 pairs of p and 1 of q as itself. b orders 4 of the 5 alike and 1 (samples 1 and 2) otherwise; it
    # ties the pair of q, and a that of samples 2 and 3. c ties everything, so it has no number; nor has a's component.
    assert found == {"reward/a/agreement": 1.0, "reward/b/agreement": pytest.approx((4 - 1) / 5)}


def test_a_reward_of_negative_weight_agrees_by_its_sign_and_one_alone_has_no_agreement() -> None:
    opposed = {"a": Given(0, 1, 2, 3), "b": Given(0, 1, 2, 3)}
    found = agreements(score(make_track(), opposed, {"a": 1.0, "b": -2.0}))
    assert found == {"reward/a/agreement": -1.0, "reward/b/agreement": -1.0}
    assert agreements(score(make_track(), {"a": Given(0, 1, 2, 3)}, {"a": 1.0})) == {}


@pytest.mark.parametrize(
    ("value", "weights", "total", "sample"),
    [(2e38, (1.0, 1.0), "inf", 1), (1.0, (math.nan, 1.0), "nan", 0), (3e38, (10.0, -10.0), "nan", 1)],
)
def test_a_combined_reward_that_is_not_finite_names_the_sum_sample_and_prompt(
    value: float, weights: tuple[float, float], total: str, sample: int
) -> None:
    """Each score is finite, and the sum is not in fp32, which ends at 3.4e38."""
    rewards = {"a": Given(0, value, 0, 0), "b": Given(0, value, 0, 0)}
    terms = f"{weights[0]:g} a \\+ {weights[1]:g} b".replace("-", "\\-")
    where = rf"sample 'p/{sample}' \(prompt 'prompt {sample}'\)"
    with pytest.raises(RewardFailed, match=f"reward: the weighted sum {terms} is {total} for {where}"):
        score(make_track(), rewards, dict(zip("ab", weights, strict=True)))


def test_a_constant_reward_is_seen_and_padding_does_not_hide_it() -> None:
    assert constant_reward(score(make_track(), {"a": Given(2, 2, 2, 2)}, {"a": 1.0})) == 2
    assert constant_reward(score(make_track(), {"a": Given(2, 2, 2, 3)}, {"a": 1.0})) is None


def test_costs_count_the_steps_that_are_trained_on() -> None:
    """Two samples of four steps, all stochastic; one step of each is trained on: positions {i, i+1, 4}."""
    request = LatentRequest(
        sampling=LatentSamplingConfig(num_inference_steps=4),
        sigmas=torch.linspace(1, 0, 5),
        sde_steps=torch.arange(4).repeat(2, 1),
        train_steps=torch.tensor([[0], [3]]),
        noise_ids=("a", "b"),
        initial_noise=("", ""),
        keep=torch.tensor([[0, 2], [3, -1]]),
    )
    cost = latent_step_cost(request, latent_shape=(2, 3), replayed_share=1.0)
    assert (cost.rollout_rows, cost.old_log_prob_rows, cost.train_rows) == (8, 2, 2)
    # Positions 0, 1, 2, 4 of the first row, 3 and 4 of the other.
    assert cost.stored_bytes == (4 + 2) * 6 * 4


@pytest.mark.parametrize("branches", [1, 2])
def test_costs_are_the_formulas(branches: int) -> None:
    rows, steps = 6, 10
    request = LatentRequest(
        sampling=LatentSamplingConfig(num_inference_steps=steps),
        num_branches=branches,
        sigmas=torch.linspace(1, 0, steps + 1),
        # Three neighbours store 4 positions, two apart store 4; the end is one more; -1 is padding.
        sde_steps=torch.tensor([[0, 1, 2]] * 3 + [[1, 4, -1]] * 3),
        noise_ids=tuple("abcdef"),
        initial_noise=("",) * rows,
        keep=torch.zeros(rows, 0, dtype=torch.int64),
    )
    cost = latent_step_cost(request, latent_shape=(4, 8, 8), replayed_share=1.0)
    assert cost.rollout_rows == rows * steps * branches
    assert cost.old_log_prob_rows == cost.train_rows == (3 * 3 + 3 * 2) * branches
    assert cost.stored_bytes == (3 * 5 + 3 * 5) * 4 * 8 * 8 * 4
    # Training costs a forward for the anchor, and a forward and two more for the backward of the update.
    assert cost.generate_share == pytest.approx(60 / (60 + 15 + 45))
    assert latent_step_cost(request, latent_shape=(4, 8, 8), replayed_share=0.0).old_log_prob_rows == 0


class Contrast(Given):
    """Twice the mean pixel, for as many samples as it is given; its count is kept."""

    def __init__(self, *, cut: bool = False) -> None:
        self.counts: list[int] = []
        self._cut = cut

    def score(self, samples: ScoreInput) -> Scores:
        self.counts.append(len(samples.sample_ids))
        pixels = samples.of("image", reward="contrast").stacked
        values = 2 * pixels.flatten(1).mean(dim=1)
        return Scores(values=values.detach() if self._cut else values)


def test_the_score_of_a_loss_has_the_weighted_gradient_of_its_rewards() -> None:
    score_of = MediaScore(rewards={"a": Contrast(), "b": Contrast()}, weights={"a": 0.5, "b": 3.0}, kind="image")
    media = torch.linspace(0, 1, 48).view(4, 3, 2, 2).requires_grad_()
    values = score_of(make_track(), media)
    expected = 2 * 3.5 * media.detach().flatten(1).mean(dim=1)
    torch.testing.assert_close(values.detach(), expected)
    (gradient,) = torch.autograd.grad(values.sum(), media)
    torch.testing.assert_close(gradient, torch.full_like(gradient, 2 * 3.5 / 12))


def test_rows_of_weight_0_are_not_scored_and_have_no_gradient() -> None:
    reward = Contrast()
    track = dataclasses.replace(make_track(), sample_weights=torch.tensor([1.0, 0.0, 0.5, 0.0]))
    media = torch.full((4, 3, 2, 2), 0.5)
    media[[1, 3]] = math.nan
    values = MediaScore(rewards={"a": reward}, weights={"a": 1.0}, kind="image")(track, media.requires_grad_())
    assert reward.counts == [2] and values.tolist() == [1.0, 0.0, 1.0, 0.0]
    (gradient,) = torch.autograd.grad(values.sum(), media)
    assert bool((gradient[[1, 3]] == 0).all()) and bool((gradient[[0, 2]] > 0).all())


def test_a_rank_with_padding_alone_still_has_a_graph_to_go_back_through() -> None:
    track = dataclasses.replace(make_track(), sample_weights=torch.zeros(4))
    media = torch.full((4, 3, 2, 2), 0.5, requires_grad=True)
    assert MediaScore(rewards={"a": Contrast()}, weights={"a": 1.0}, kind="image")(track, media).requires_grad


def test_under_no_grad_no_gradient_is_asked_for() -> None:
    """A loss may look at scores that it does not train on."""
    media = torch.full((4, 3, 2, 2), 0.5, requires_grad=True)
    with torch.no_grad():
        values = MediaScore(rewards={"a": Contrast()}, weights={"a": 1.0}, kind="image")(make_track(), media)
    assert values.tolist() == [1.0] * 4 and not values.requires_grad


def test_a_score_of_a_loss_without_a_gradient_is_refused() -> None:
    score_of = MediaScore(rewards={"a": Contrast(cut=True)}, weights={"a": 1.0}, kind="image")
    media = torch.full((4, 3, 2, 2), 0.5)
    assert score_of(make_track(), media).tolist() == [1.0] * 4
    with pytest.raises(RewardFailed, match=r"reward\.a: got scores without a gradient, expected scores that depend on"):
        score_of(make_track(), media.requires_grad_())


def test_rates_are_operations_over_seconds_and_their_share_of_the_peak() -> None:
    """3e15 operations in 10 s are 300 TFLOP/s, and 30 % of 1000."""
    flops = {"generate": 3e15, "train": 8e15}
    assert Speed(flops=flops, peak_tflops=1000.0).metrics({"generate": 10.0, "train": 20.0}) == pytest.approx(
        {"perf/generate_tflops": 300, "perf/generate_mfu": 0.3, "perf/train_tflops": 400, "perf/train_mfu": 0.4}
    )
    # Without a peak no share; a step that took no update has no rate of training.
    assert Speed(flops=flops).metrics({"generate": 10.0, "train": 0.0}) == pytest.approx({"perf/generate_tflops": 300})


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        # Another product than the one whose name begins its own.
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A10G", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("", None),
    ],
)
def test_a_peak_is_known_for_the_product_itself_alone(device: str, peak: float | None) -> None:
    assert peak_tflops_of(device) == peak


def test_bytes_of_a_rollout_are_those_of_its_arrays() -> None:
    """Of 4 images of 2 x 2: 4 x 3 x 2 x 2 bytes at 8 bits, 4 times as many in fp32; and of ragged conditions."""
    levels = torch.zeros(4, 3, 2, 2, dtype=torch.uint8)
    conditions = {
        "positive": Conditions(values={"text": (torch.zeros(5, 2), torch.zeros(1, 2))}, index=torch.zeros(4).long())
    }
    for values, size in ((levels, 48), (tuple(levels), 48), (levels.float(), 192)):
        track = dataclasses.replace(make_track(), media=Media(kind="image", values=values), conditions=conditions)
        assert track_bytes([track]) == {"perf/media_bytes": size, "perf/conditions_bytes": 4 * (5 + 1) * 2}
    assert track_bytes([dataclasses.replace(track, media=None, conditions={})]) == {}
