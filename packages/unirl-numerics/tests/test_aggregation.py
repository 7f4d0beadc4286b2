"""How the losses of tokens become one number: golden numbers, NumPy, and no split that changes it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from unirl.core.roles import LossTerm
from unirl.numerics.loss.aggregation import aggregation_weights
from unirl.numerics.loss.reduction import reduce_terms, weight_totals

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def horizon_of(mode, horizon=5):
    return horizon if mode == "seq-mean-token-sum-norm" else None


def term(values, valid, row_weights, mode):
    result = aggregation_weights(valid, row_weights, mode, horizon=horizon_of(mode))
    return LossTerm(name="policy", values=values, weights=result.weights, normalizer=result.normalizer)


@pytest.mark.parametrize(("mode", "expected"), [*zip(MODES, (1.0, 4.375, 1.0, 0.875), strict=True)])
def test_the_golden_numbers_of_an_all_ones_loss(mode, expected):
    """8 rows of 5, of which 35 tokens are valid."""
    valid = torch.arange(5) < torch.tensor([5, 5, 5, 5, 5, 5, 4, 1])[:, None]
    one = term(torch.ones(8, 5), valid, torch.ones(8), mode)
    assert float(reduce_terms([one], totals=weight_totals([one]))) == pytest.approx(expected, rel=1e-6)  # fp32


def by_numpy(values, valid, row_weights, mode):
    values, valid = np.where(valid, values, 0.0), np.asarray(valid)
    weights = np.where(valid.any(1), row_weights, 0.0)
    lengths = valid.sum(1)
    if mode == "token-mean":
        return (weights @ values.sum(1)) / (weights @ lengths)
    per_row = values.sum(1)
    if mode == "seq-mean-token-mean":
        per_row = per_row / np.maximum(lengths, 1)
    if mode == "seq-mean-token-sum-norm":
        per_row = per_row / 5
    return weights @ per_row / weights.sum()


@pytest.mark.parametrize("mode", MODES)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 2**31))
@settings(max_examples=25)
def test_every_mode_is_its_formula_in_any_split_into_micro_batches(mode, sizes, seed):
    num_rows = sum(sizes)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(num_rows, 5, generator=generator)
    valid = torch.rand(num_rows, 5, generator=generator) > 0.4  # with holes, and rows of nothing
    valid[0, 0] = True
    row_weights = torch.rand(num_rows, generator=generator)
    row_weights[1:] *= torch.rand(num_rows - 1, generator=generator) > 0.2
    values[~valid] = float("nan")

    order = torch.randperm(num_rows, generator=generator).split(sizes)
    terms = [term(values[rows].requires_grad_(), valid[rows], row_weights[rows], mode) for rows in order]
    announced = [
        aggregation_weights(valid[r], row_weights[r], mode, horizon=horizon_of(mode)).normalizer for r in order
    ]
    totals = weight_totals({"policy": torch.cat(announced)})
    # fp32 weights, added up in fp64.
    assert float(totals["policy"]) == pytest.approx(float(weight_totals(terms)["policy"]), rel=1e-7)
    result = sum(float(reduce_terms([each], totals=totals).detach()) for each in terms)
    expected = by_numpy(values.double().numpy(), valid.numpy(), row_weights.double().numpy(), mode)
    # Weighted means of at most 100 fp32 numbers of order 1, sums of at most 5 of them.
    assert result == pytest.approx(expected, rel=1e-6, abs=2e-6)


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_is_the_same_for_every_split(mode):
    generator = torch.Generator().manual_seed(5)
    x, valid = torch.randn(6, 5, 3, generator=generator), torch.rand(6, 5, generator=generator) > 0.3
    parameter = torch.randn(3, generator=generator, requires_grad=True)

    def gradient(splits):
        terms = [term(x[rows] @ parameter, valid[rows], torch.ones(len(rows)), mode) for rows in splits]
        totals = weight_totals(terms)
        return sum(torch.autograd.grad(reduce_terms([each], totals=totals), [parameter])[0] for each in terms)

    whole, split = gradient([range(6)]), gradient([[0], [4, 1, 2], [3, 5]])
    torch.testing.assert_close(split, whole, rtol=1e-6, atol=1e-6)  # fp32, 30 terms of order 1


def test_a_row_without_valid_tokens_counts_in_no_mode():
    valid = torch.tensor([[True, True], [False, False]])
    for mode in MODES:
        result = aggregation_weights(valid, torch.ones(2), mode, horizon=horizon_of(mode))
        assert result.normalizer.tolist() == [2.0 if mode == "token-mean" else 1.0, 0.0]
        assert result.weights[1].tolist() == [0.0, 0.0]


def test_what_does_not_fit_is_refused():
    valid = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="horizon = None with mode 'seq-mean-token-sum-norm'"):
        aggregation_weights(valid, torch.ones(2), "seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match="horizon = 5 with mode 'token-mean'"):
        aggregation_weights(valid, torch.ones(2), "token-mean", horizon=5)
    with pytest.raises(ValueError, match="'mean' is not known"):
        aggregation_weights(valid, torch.ones(2), "mean")
    with pytest.raises(ValueError, match=r"row_weights \[3\]"):
        aggregation_weights(valid, torch.ones(3), "token-mean")
