"""The samples that a gated KL penalty applies to, against ranks by hand and a count of pairs in plain Python."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from statistics import fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from unirl.core.types.inputs import Inputs
from unirl.core.types.track import Status, TextSegment, Track
from unirl.numerics.loss.adaptive_kl import AdaptiveKl
from unirl.numerics.loss.kl import kl_estimate
from unirl.numerics.loss.kl_config import KlConfig, TokenKlConfig
from unirl.numerics.loss.kl_gate import most_uncertain
from unirl.numerics.loss.reduction import reduce_terms, weight_totals
from unirl.numerics.tokens.kl import TokenKl
from unirl.numerics.tokens.policy import token_weights


def gate(
    trained: Sequence[float],
    *others: Sequence[float],
    share: float,
    groups: str | None = None,
    ids: Sequence[str] | None = None,
    weights: Sequence[float] | None = None,
) -> list[float]:
    """The gate for one trained reward beside others of weight 0."""
    parts = [torch.tensor(values) for values in (trained, *others)]
    return most_uncertain(
        parts[0],
        parts,
        share=share,
        group_ids=groups or "g" * len(trained),
        sample_ids=ids or [f"{row:03}" for row in range(len(trained))],
        weights=torch.ones(len(trained)) if weights is None else torch.tensor(weights),
    ).tolist()


def test_the_sample_that_only_the_trained_reward_likes_is_penalised() -> None:
    """Win rates by hand: the trained reward's 1, 2/3, 1/3, 0; those of the others 0, 2/3, 1, 1/3 and 1/3, 2/3, 1, 0."""
    trained, others = [9.0, 5.0, 2.0, 1.0], ([0.1, 0.3, 0.4, 0.2], [20.0, 30.0, 40.0, 10.0])
    # By equation 7: 1 - 1/6, 0, 1/3 - 1, -1/6.
    assert gate(trained, *others, share=0.25) == [1, 0, 0, 0]
    assert gate(trained, *others, share=0.5) == [1, 1, 0, 0]
    assert gate(trained, *others, share=0.75) == [1, 1, 0, 1]
    assert gate(trained, *others, share=1.0) == [1, 1, 1, 1]
    # The rewards' scales do not matter.
    assert gate([math.exp(value) for value in trained], *others, share=0.25) == [1, 0, 0, 0]


def test_several_trained_rewards_are_compared_with_their_sum() -> None:
    """Win rates of the sum 1, 1/2, 0; those of its terms 1, 0, 1/2 and 0, 1, 1/2: one reward alone lifts the first."""
    one, two = torch.tensor([10.0, 0.0, 1.0]), torch.tensor([0.0, 2.0, 0.5])
    result = most_uncertain(one + two, [one, two], share=0.3, group_ids="ggg", sample_ids="abc", weights=torch.ones(3))
    assert result.tolist() == [1, 0, 0]


def test_a_tie_of_a_reward_counts_half_and_of_the_uncertainty_goes_to_the_higher_id() -> None:
    # A reward of 0 and 1: U is 5/6 - 1/2 of its ones, whoever they are, and 1/6 - 1/2 of its zeros.
    assert gate([1, 0, 1, 0], [7, 7, 7, 7], share=0.25) == [0, 0, 1, 0]
    assert gate([1, 0, 1, 0], [7, 7, 7, 7], share=0.25, ids=["d", "c", "b", "a"]) == [1, 0, 0, 0]
    # Were a tie no win, the sample of 0 would be as uncertain as the last one, and have the lower id.
    assert gate([1, 0, 1, 1], [3, 0, 2, 1], share=0.25) == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("share", "count", "size"), [(0.1, 1, 4), (0.1, 1, 10), (0.1, 3, 24), (0.07, 7, 100), (0.3, 3, 10), (0.99, 10, 10)]
)
def test_the_share_is_rounded_up_but_for_the_rounding_of_floats(share: float, count: int, size: int) -> None:
    scores = [float(number) for number in range(size)]
    assert sum(gate(scores, scores[::-1], share=share)) == count


def test_groups_padding_and_missing_scores_are_kept_apart() -> None:
    nan = math.nan
    # Group a: U = (1, 0) - (0, 1); group b: the other way round. The last row has weight 0 and NaN for its scores.
    result = gate(
        [5.0, 1.0, 4.0, 3.0, nan], [0.0, 2.0, 8.0, 9.0, nan], share=0.5, groups="abaab", weights=[1, 1, 1, 1, 0]
    )
    # Of a: rows 0, 2 and 3, with U in proportion to 1 - 0, 1/2 - 1/2 and 0 - 1; of b: row 1 alone.
    assert result == [1, 1, 1, 0, 0]
    # A sample without a score has the mean, 1/2: U in proportion to 1 - 1/2, 1/2 - 1 and 0 - 0.
    assert gate([3.0, 2.0, 1.0], [nan, 8.0, 5.0], share=0.3) == [1, 0, 0]
    # No other score at all, and no row at all.
    assert gate([3.0, 2.0, 1.0], [nan, nan, nan], share=0.3) == [1, 0, 0]
    assert gate([1.0, 2.0], [1.0, 2.0], share=0.5, weights=[0, 0]) == [0, 0]


@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from("abc"), st.integers(0, 4), st.integers(0, 4), st.one_of(st.none(), st.integers(0, 4))
        ),
        min_size=1,
        max_size=12,
    ),
    share=st.sampled_from([0.1, 0.25, 0.5, 0.9]),
    data=st.data(),
)
@settings(max_examples=60)
def test_it_is_the_top_of_equation_7_in_any_order_of_the_rows(
    rows: list[tuple[str, int, int, int | None]], share: float, data: st.DataObject
) -> None:
    def rate(column: int, row: int) -> float:
        mine = rows[row][column]
        rivals = [rows[j][column] for j in range(len(rows)) if j != row and rows[j][0] == rows[row][0]]
        scored = [rival for rival in rivals if rival is not None]
        if mine is None or not scored:
            return 0.5
        return fmean((mine > rival) + (mine == rival) / 2 for rival in scored)  # type: ignore[operator]

    ids = [f"{row:02}" for row in range(len(rows))]
    uncertainty = [round(rate(1, row) - (rate(2, row) + rate(3, row)) / 2, 9) for row in range(len(rows))]
    expected = set[str]()
    for group in {group for group, *_ in rows}:
        own = sorted((r for r in range(len(rows)) if rows[r][0] == group), key=lambda r: (uncertainty[r], ids[r]))
        expected |= {ids[row] for row in own[len(own) - math.ceil(round(share * len(own), 6)) :]}
    order = data.draw(st.permutations(range(len(rows))))
    columns = [[math.nan if rows[row][c] is None else float(rows[row][c]) for row in order] for c in (1, 2, 3)]  # type: ignore[arg-type]
    result = gate(*columns, share=share, groups="".join(rows[row][0] for row in order), ids=[ids[row] for row in order])
    assert {ids[row] for row, taken in zip(order, result, strict=True) if taken} == expected


def a_track(**parts: Sequence[float]) -> Track:
    """Completions of one and of two tokens in turn, of one prompt."""
    count = len(next(iter(parts.values())))
    scores = {name: torch.tensor(values) for name, values in parts.items()}
    return Track(
        name="t",
        sample_ids=tuple(f"p/{row}" for row in range(count)),
        group_ids=("p",) * count,
        inputs=Inputs.of_texts([""] * count),
        metadata=({},) * count,
        segment=TextSegment(
            prompt_tokens=(torch.tensor([1]),) * count,
            tokens=tuple(torch.zeros(1 + row % 2, dtype=torch.int64) for row in range(count)),
        ),
        rewards=scores["trained"],
        reward_parts=scores,
        sample_weights=torch.ones(count),
        status=(Status.COMPLETED,) * count,
        policy_version=(0,) * count,
    )


def test_without_a_gate_a_track_and_its_kl_are_the_same_objects() -> None:
    track, kl = a_track(trained=[1.0, 2.0]), torch.rand(2, 3)
    for config in (KlConfig(kl_coef=0.1), KlConfig(kl_gate=0.5)):
        algorithm = AdaptiveKl(config)
        assert algorithm.with_kl_weights(track, reward_weights={"trained": 1.0}) is track
        assert algorithm.gated(kl, track) is kl


def test_a_reward_of_negative_weight_counts_as_its_opposite() -> None:
    """Trained on the negative of the first, which agrees with the second: the last sample is liked by none but it."""
    track = a_track(trained=[1.0, 2.0, 3.0], watched=[30.0, 20.0, 10.0])
    track = dataclasses.replace(track, rewards=-track.reward_parts["trained"])
    algorithm = AdaptiveKl(KlConfig(kl_coef=0.1, kl_gate=0.3))
    result = algorithm.with_kl_weights(track, reward_weights={"trained": -1.0, "watched": 0.0})
    assert result.kl_weights is not None
    # All agree, so that every U is 0 and the highest id is taken; with the sign as it is the first would be.
    assert result.kl_weights.tolist() == [0, 0, 1]
    opposed = dataclasses.replace(track, reward_parts={**track.reward_parts, "watched": torch.tensor([1.0, 2.0, 3.0])})
    result = algorithm.with_kl_weights(opposed, reward_weights={"trained": -1.0, "watched": 0.0})
    assert result.kl_weights is not None and result.kl_weights.tolist() == [1, 0, 0]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_the_kl_of_tokens_is_that_of_the_gated_samples_over_all_samples_in_any_split(mode: str) -> None:
    config = TokenKlConfig(kl_coef=0.5, kl_gate=0.25, kl_estimator="k2")
    algorithm = TokenKl(config)
    track = a_track(trained=[9.0, 5.0, 2.0, 1.0], watched=[0.1, 0.3, 0.4, 0.2])
    track = algorithm.with_kl_weights(track, reward_weights={"trained": 1.0, "watched": 0.0})
    assert track.kl_weights is not None and track.kl_weights.tolist() == [1, 0, 0, 0]
    live = torch.tensor([[-1.0, 0.0], [-2.0, -3.0], [-1.5, 0.0], [-0.5, -2.5]], dtype=torch.float64)

    class Reference:
        def __init__(self, log_probs: torch.Tensor) -> None:
            self.log_probs = log_probs - 0.6

        def __call__(self, _: Track, *, policy: str) -> Reference:
            assert policy == "reference"
            return self

    def loss(pieces: Sequence[slice]) -> tuple[float, float]:
        tracks = [track.select(range(4)[piece]) for piece in pieces]
        weights = [token_weights(piece, mode) for piece in tracks]  # type: ignore[arg-type]
        announced = [weight_totals(algorithm.kl_weights(weight)) for weight in weights]
        totals = {"kl": torch.stack([total["kl"] for total in announced]).sum()}
        value = measured = count = 0.0
        for piece, own, weight in zip(pieces, tracks, weights, strict=True):
            # As wide as the longest completion of the piece.
            rows = live[piece, : weight.counted.shape[1]]
            given = {"log_probs": rows, "old_log_probs": rows, "weights": weight}
            terms, metrics = algorithm.kl_terms(own, Reference(rows), **given)  # type: ignore[arg-type]
            value += float(reduce_terms(terms, totals=totals))
            measured += float(metrics["kl"].total)
            count += float(metrics["kl"].weight)
        return value, measured / count

    # k2 of a difference of 0.6 is 0.18 in each of the 6 tokens of 4 completions, and the first has one of them.
    expected = 0.5 * 0.18 / (6 if mode == "token-mean" else 4)
    for pieces in ([slice(0, 4)], [slice(0, 1), slice(1, 4)], [slice(0, 2), slice(2, 4)]):
        value, measured = loss(pieces)
        assert value == pytest.approx(expected, rel=1e-6)  # weights of fp32
        assert measured == pytest.approx(0.18, rel=1e-6), "the log has the mean over all"


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_a_gate_holds_back_the_sample_that_one_reward_likes_and_frees_the_one_that_all_like(share: float) -> None:
    """A policy over four actions, uniform at first, with beta = 0.5. Where the gradient of sum p (r - beta f k2) is 0,
    r - beta f log(p / q) is equal for all actions that are left. Without a gate (f = 1) p is in proportion to
    exp(r / beta), alike for the two actions that the trained reward likes. With f = 1 for the second one alone, that
    one keeps its 1/4, and the first takes all of the rest.
    """
    beta, trained, watched = 0.5, [1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0]
    algorithm = AdaptiveKl(KlConfig(kl_coef=beta, kl_gate=share))
    track = algorithm.with_kl_weights(
        a_track(trained=trained, watched=watched), reward_weights={"trained": 1.0, "watched": 0.0}
    )
    reward, logits, reference = torch.tensor(trained), torch.zeros(4), torch.full((4, 1), math.log(0.25))
    for _ in range(200):
        log_probs = torch.log_softmax(logits, dim=0)[:, None].requires_grad_()
        kl = algorithm.gated(kl_estimate(log_probs, reference, estimator="k2"), track)
        # The natural gradient: of one sample of each action, whatever its probability.
        (algorithm.kl_coef * kl.sum() - (reward[:, None] * log_probs).sum()).backward()
        assert log_probs.grad is not None
        logits = logits - 0.2 * log_probs.grad[:, 0]
    plain = torch.tensor([math.exp(r / beta) for r in trained])
    expected = plain / plain.sum() if share == 1 else torch.tensor([0.75, 0.25, 0.0, 0.0])
    # Each step takes a tenth off the distance, or exp(-0.2) off the probability of an action without reward.
    torch.testing.assert_close(torch.softmax(logits, dim=0), expected, rtol=0, atol=1e-5)
