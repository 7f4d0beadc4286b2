"""Reduction: no split of the batch changes the gradient, and weight 0 is nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from unirl.core.roles import LossTerm
from unirl.numerics.loss.losses import clipped_surrogate
from unirl.numerics.loss.reduction import reduce_terms, weight_totals


def test_a_term_is_its_weighted_mean_times_its_scale():
    terms = [
        LossTerm(
            name="policy", values=torch.tensor([[1.0, 2.0], [3.0, 4.0]]), weights=torch.tensor([[1.0, 1], [2, 0]])
        ),
        LossTerm(name="kl", values=torch.tensor([5.0, 7.0]), weights=torch.ones(2), scale=0.1),
    ]
    totals = weight_totals(terms)
    assert {name: float(total) for name, total in totals.items()} == {"policy": 4.0, "kl": 2.0}
    # (1 + 2 + 6) / 4 + 0.1 * 6
    assert float(reduce_terms(terms, totals=totals)) == pytest.approx(2.85, rel=1e-6)  # fp32


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=5),
    st.integers(0, 2**31),
)
@settings(max_examples=30)
def test_any_split_into_micro_batches_gives_the_same_gradient(sizes, seed):
    num_rows = sum(sizes)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, 3, 8, generator=generator)
    old = torch.randn(num_rows, 3, generator=generator) * 0.1
    advantages = torch.randn(num_rows, generator=generator)
    weights = torch.rand(num_rows, 3, generator=generator) * (torch.rand(num_rows, 3, generator=generator) > 0.3)
    weights[0, 0] = 1.0
    parameter = torch.randn(8, generator=generator).mul(0.1).requires_grad_()

    def terms(rows):
        log_prob = x[rows] @ parameter
        surrogate = clipped_surrogate(log_prob - old[rows], advantages[rows], clip_low=0.2, clip_high=0.2)
        return [
            LossTerm(name="policy", values=surrogate.loss, weights=weights[rows]),
            LossTerm(name="kl", values=log_prob.square(), weights=weights[rows].square(), scale=0.04),
        ]

    whole = slice(0, num_rows)
    totals = weight_totals({"policy": weights, "kl": weights.square()})
    (expected,) = torch.autograd.grad(reduce_terms(terms(whole), totals=totals), [parameter])

    order = torch.randperm(num_rows, generator=generator)
    result = torch.zeros_like(parameter)
    for rows in order.split(sizes):
        result += torch.autograd.grad(reduce_terms(terms(rows), totals=totals), [parameter])[0]
    # Sums of at most 90 fp32 numbers in another order: relative to the largest component, some 1e-7.
    scale = float(expected.abs().max()) or 1.0
    assert float((result - expected).abs().max()) <= 1e-6 * max(scale, 1.0)


def test_totals_of_terms_add_up_over_micro_batches():
    weights = torch.tensor([1.0, 2.0, 0.0, 4.0])
    parts = [LossTerm(name="policy", values=part, weights=part) for part in weights.split(2)]
    assert float(weight_totals(parts)["policy"]) == 7.0
    assert weight_totals({"policy": weights})["policy"] == 7.0


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_an_element_of_weight_0_contributes_exactly_nothing(poison):
    values = torch.tensor([1.0, poison, 3.0], requires_grad=True)
    term = LossTerm(name="policy", values=values, weights=torch.tensor([1.0, 0.0, 2.0]))
    loss = reduce_terms([term], totals={"policy": torch.tensor(3.0)})
    assert float(loss.detach()) == pytest.approx(7 / 3)
    (gradient,) = torch.autograd.grad(loss, [values])
    assert gradient.tolist() == pytest.approx([1 / 3, 0, 2 / 3])
    assert gradient[1] == 0


def test_a_step_without_weight_is_exactly_0_and_can_be_walked_back():
    values = torch.tensor([1.0, float("nan")], requires_grad=True)
    term = LossTerm(name="policy", values=values, weights=torch.zeros(2))
    loss = reduce_terms([term], totals=weight_totals([term]))
    assert float(loss.detach()) == 0.0
    (gradient,) = torch.autograd.grad(loss, [values])
    assert gradient.tolist() == [0.0, 0.0]


def test_totals_that_cannot_be_right_are_refused():
    term = LossTerm(name="policy", values=torch.ones(2), weights=torch.ones(2))
    with pytest.raises(ValueError, match=r"total is 0\.0, but elements have weight"):
        reduce_terms([term], totals={"policy": torch.tensor(0.0)})
    with pytest.raises(ValueError, match=r"'policy' has no total; totals are for \['kl'\]"):
        reduce_terms([term], totals={"kl": torch.tensor(1.0)})
    with pytest.raises(ValueError, match="there are no loss terms"):
        reduce_terms([], totals={})
    with pytest.raises(ValueError, match=r"values have shape \[2, 3\], weights \[2\]"):
        LossTerm(name="policy", values=torch.ones(2, 3), weights=torch.ones(2))
