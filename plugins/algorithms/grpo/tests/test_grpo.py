"""GRPO in the train stack, on a language model of a few numbers; advantages; and what a plan is refused for."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from token_algorithms.tracks import one_group
from unirl.algorithms.grpo.algorithm import Grpo
from unirl.algorithms.grpo.config import (
    CispoConfig,
    DapoConfig,
    DrGrpoConfig,
    GrpoConfig,
    GspoConfig,
    ReinforcePpConfig,
    RlooConfig,
)
from unirl.core.errors import BatchError
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.types.track import Status, TextSegment, Track

NAMED = [
    GrpoConfig(kl_coef=0.1, entropy_coef=0.05, tis="token", tis_cap=1.02),
    DrGrpoConfig(max_length=6, tis="sequence", tis_cap=1.02),
    DapoConfig(truncated="mask"),
    GspoConfig(clip_range=0.02, clip_range_high=0.02),
    CispoConfig(clip_range_high=0.1, kl_coef=0.1, kl_estimator="k2"),
    RlooConfig(dual_clip=1.5),
    RlooConfig(ratio="completion"),
    ReinforcePpConfig(kl_coef=0.1),
]
EACH = pytest.mark.parametrize("config", NAMED, ids=lambda config: type(config).__name__)


def make(config: GrpoConfig, *, advantage: AdvantageConfig | None = None, old_log_probs: str = "replay") -> Grpo:
    return Grpo(
        config,
        advantage=advantage or AdvantageConfig(),
        reward_weights={"one": 1.0},
        train=TrainConfig(old_log_probs=old_log_probs),
    )


class Anchored(Grpo):
    """With the old-log-prob pass behind it, so that the weights may have moved since."""

    def __init__(self, algorithm: Grpo) -> None:
        self.__dict__ = algorithm.__dict__

    def with_old_log_probs(self, track: Track, replay: Any) -> Track:
        return track


@EACH
def test_the_first_ratio_is_exactly_one_whatever_the_engine_said(bench: Any, config: GrpoConfig) -> None:
    for micro_batch_size in (0, 2):
        numbers = bench.train(make(config), micro_batch_size=micro_batch_size)
        assert numbers["ratio_max_dev_first"] == 0.0
        assert numbers["clip_fraction"] == 0.0
        assert numbers["logp_mismatch_max"] > 0.01


def test_old_log_probs_of_the_engine_are_left_as_they_are(bench: Any) -> None:
    numbers = bench.train(make(GrpoConfig(), old_log_probs="engine"))
    # The engine's are 0.05 off.
    assert 0.01 < numbers["ratio_max_dev_first"] < 0.3
    assert numbers["logp_mismatch_max"] > 0.01


def test_the_anchor_keeps_the_log_probs_of_the_engine_where_a_weight_needs_them(bench: Any) -> None:
    anchored = make(GrpoConfig(tis="token")).with_old_log_probs(bench.track, bench.replay())
    for kept, given, old in zip(
        anchored.text.engine_log_probs, bench.track.text.log_probs, anchored.text.log_probs, strict=True
    ):
        assert torch.equal(kept, given) and not torch.equal(old.float(), given)
    bare = dataclasses.replace(bench.track, segment=dataclasses.replace(bench.track.text, log_probs=None))
    with pytest.raises(BatchError, match=r"TextSegment\.log_probs: .* track 'text' came without"):
        make(GrpoConfig(tis="token")).with_old_log_probs(bare, bench.replay())
    assert make(GrpoConfig()).with_old_log_probs(bare, bench.replay()).text.log_probs is not None


@EACH
def test_no_split_order_padding_or_packing_changes_the_gradient(bench: Any, config: GrpoConfig) -> None:
    algorithm = make(config)
    track, fixed = algorithm.with_old_log_probs(bench.track, bench.replay()), Anchored(algorithm)
    mixed = track.select([4, 2, 0, 5, 1, 3])
    bench.move()
    whole = bench.train(fixed, track)
    expected = bench.gradient
    assert expected.abs().max() > 1e-3
    for changed, settings in (
        (track, {"micro_batch_size": 1}),
        (track, {"micro_batch_size": 4}),
        (track, {"micro_batch_tokens": 9}),
        (mixed, {"micro_batch_size": 2}),
        (track.padded(9), {"micro_batch_size": 2}),
        (track, {"packing": False}),
    ):
        numbers = bench.train(fixed, changed, **settings)
        # Log-probs are fp64; weights of tokens fp32, the same numbers in every split.
        torch.testing.assert_close(bench.gradient, expected, rtol=1e-6, atol=1e-9)
        assert {name: numbers[name] for name in whole} == pytest.approx(whole, rel=1e-5, abs=1e-9)


@EACH
def test_zero_advantages_give_no_gradient(bench: Any, config: GrpoConfig) -> None:
    flat = dataclasses.replace(bench.track, advantages=torch.zeros(6))
    bench.gradient = torch.zeros(())
    bench.train(make(dataclasses.replace(config, kl_coef=0.0, entropy_coef=0.0)), flat)
    assert not bench.gradient.any()


@EACH
def test_a_step_favours_texts_with_advantage(bench: Any, config: GrpoConfig) -> None:
    """Gains in log-prob, weighted by the advantage, with the KL and entropy terms switched off."""
    plain = dataclasses.replace(config, kl_coef=0.0, entropy_coef=0.0)
    track = bench.track
    with torch.no_grad():
        before = bench.replay()(track).log_probs
    bench.lr = 0.01
    bench.train(make(plain), track)
    with torch.no_grad():
        gained = (bench.replay()(track).log_probs - before).sum(dim=1)
    weights = make(plain).loss_weights(track)["policy"]
    assert float((track.advantages * gained * (weights > 0)).sum()) > 0


def test_at_ratio_one_the_gradient_is_that_of_reinforce(bench: Any) -> None:
    """RLOO at the first update: minus the advantage times the gradient of the log-prob of the text, mean over texts."""
    log_probs = bench.replay()(bench.track).log_probs
    expected = torch.autograd.grad(
        -(bench.track.advantages * log_probs.sum(dim=1)).mean(), list(bench.model.parameters())
    )
    bench.train(make(RlooConfig()))
    torch.testing.assert_close(bench.gradient, torch.cat([part.flatten() for part in expected]), rtol=1e-12, atol=1e-14)


def test_the_reference_runs_only_where_it_is_asked_for(bench: Any) -> None:
    asked: list[str] = []

    def noting(track: Track, *, policy: str = "live") -> Any:
        asked.append(policy)
        return bench.replay()(track, policy=policy)

    for coefficient, expected in ((0.0, ["live"]), (0.1, ["live", "reference"])):
        asked.clear()
        algorithm = make(GrpoConfig(kl_coef=coefficient))
        result = algorithm.loss(algorithm.with_old_log_probs(bench.track, bench.replay()), noting, progress=0.0)
        assert asked == expected and ("kl" in result.metrics) == (coefficient > 0)


def test_the_numbers_of_a_rollout(bench: Any) -> None:
    scored = with_rewards(bench.track, [0.0, 1.0, 1.0, 0.0, 2.0, 4.0])
    _, numbers = make(GrpoConfig()).advantages(scored.padded(8))
    # Lengths 5, 2, 3, 6, 1, 4, of which the longest was cut off.
    assert numbers["response_length_mean"] == 3.5 and numbers["response_length_max"] == 6
    assert numbers["truncated_share"] == pytest.approx(1 / 6)


def test_long_texts_lose_reward_as_in_dapo() -> None:
    """Nothing up to the buffer, all of the penalty at the limit, linear between: 0, -1/2, -1 of 2 at 16, 18 and 20."""
    track = with_rewards(texts(16, 18, 20, 1), [5.0, 5.0, 5.0, 5.0])
    config = DapoConfig(max_length=20, overlong_buffer=4, overlong_penalty=2.0)
    advantage = AdvantageConfig(normalize=False)
    result, numbers = make(config, advantage=advantage).advantages(track)
    # The mean penalty is -3/4; all of these numbers are exact in fp32.
    assert result.advantages is not None
    assert result.advantages.tolist() == [0.75, -0.25, -1.25, 0.75]
    assert numbers["overlong_penalty"] == -0.75
    assert result.rewards is not None and result.rewards.tolist() == [5.0] * 4


BESSEL = AdvantageConfig(ddof=1, eps=1e-6)


@pytest.mark.parametrize(
    ("config", "advantage", "first", "second"),
    [
        (GrpoConfig(), BESSEL, [-0.866024, 0.866024, 0.866024, -0.866024], [-1.161895, -0.387298, 0.387298, 1.161895]),
        (DrGrpoConfig(), AdvantageConfig(normalize=False), [-0.5, 0.5, 0.5, -0.5], [-3, -1, 1, 3]),
        (
            RlooConfig(),
            AdvantageConfig(normalize=False, leave_one_out=True),
            [-0.666667, 0.666667, 0.666667, -0.666667],
            [-4, -1.33333, 1.33333, 4],
        ),
    ],
)
def test_advantages_meet_the_golden_vectors(
    config: GrpoConfig, advantage: AdvantageConfig, first: list[float], second: list[float]
) -> None:
    for rewards, expected in (([0.0, 1.0, 1.0, 0.0], first), ([2.0, 4.0, 6.0, 8.0], second)):
        result, _ = make(config, advantage=advantage).advantages(with_rewards(texts(3, 1, 4, 1), rewards))
        assert result.advantages is not None
        # The vectors have six digits; 1e-6 next to a spread of a half moves the fifth but one.
        assert result.advantages.tolist() == pytest.approx(expected, abs=2e-6 * max(map(abs, expected)))


def test_reinforce_pp_whitens_over_the_batch() -> None:
    """Mean 0 and population variance (n - 1) / n, with Bessel's divisor."""
    track = dataclasses.replace(texts(3, 1, 4, 1), group_ids=("a", "a", "b", "b"))
    advantage = AdvantageConfig(scope="global", center="global", ddof=1, eps=0.0)
    result, _ = make(ReinforcePpConfig(), advantage=advantage).advantages(with_rewards(track, [1.0, 2.0, 7.0, 30.0]))
    assert result.advantages is not None
    values = result.advantages.double()
    # Rounding of four fp32 numbers of order 1.
    assert float(values.mean()) == pytest.approx(0, abs=1e-7)
    assert float(values.var(correction=0)) == pytest.approx(3 / 4, abs=1e-6)


def test_texts_that_were_cut_off_are_left_out_where_asked(bench: Any) -> None:
    """The fourth is; its tokens count neither above nor below the fraction."""
    for truncated, expected in (("keep", 21), ("mask", 15)):
        config = GrpoConfig(aggregation="token-mean", truncated=truncated, kl_coef=0.1, entropy_coef=0.1)
        totals = {name: float(value.sum()) for name, value in make(config).loss_weights(bench.track).items()}
        assert totals == {"policy": expected, "kl": expected, "entropy": expected}
    aborted = dataclasses.replace(bench.track, status=(Status.ABORTED,) * 6)
    assert float(make(GrpoConfig()).loss_weights(aborted)["policy"].sum()) == 0


def test_a_capped_weight_is_counted(bench: Any) -> None:
    """The engine thinks a token e^-2 as likely as the trainer does, another as likely: of 21 ratios one is above 2."""
    track = make(GrpoConfig(tis="token")).with_old_log_probs(bench.track, bench.replay())
    given = [value.clone() for value in track.text.log_probs or ()]
    given[0][1] -= 2.0
    engine = dataclasses.replace(track.text, engine_log_probs=tuple(given))
    numbers = bench.train(Anchored(make(GrpoConfig(tis="token"))), dataclasses.replace(track, segment=engine))
    assert numbers["importance_capped"] == pytest.approx(1 / 21)
    assert numbers["importance_ratio_max"] == pytest.approx(math.exp(2.0), rel=1e-6)


def test_texts_without_a_token_weigh_nothing_even_alone_in_a_micro_batch(bench: Any) -> None:
    """Two of five are empty: the gradient is that of the other three."""
    for config in (GrpoConfig(kl_coef=0.1, entropy_coef=0.1, tis="sequence"), GspoConfig(), CispoConfig()):
        bench = type(bench)(lengths=(3, 0, 2, 0, 4))
        bench.train(make(config), bench.track.select([0, 2, 4]))
        expected = bench.gradient
        for micro_batch_size in (0, 1):
            bench.train(make(config), micro_batch_size=micro_batch_size)
            # fp64, the same numbers in other sums.
            torch.testing.assert_close(bench.gradient, expected, rtol=1e-12, atol=1e-14)


def with_rewards(track: Track, rewards: list[float]) -> Track:
    values = torch.tensor(rewards)
    return dataclasses.replace(track, rewards=values, reward_parts={"one": values}, advantages=None)


def texts(*lengths: int) -> Track:
    """One group of texts of these lengths."""
    rows = len(lengths)
    return one_group(
        TextSegment(
            prompt_tokens=(torch.ones(1, dtype=torch.int64),) * rows,
            tokens=tuple(torch.ones(length, dtype=torch.int64) for length in lengths),
        ),
    )
