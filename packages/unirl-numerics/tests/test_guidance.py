"""Guidance: the formula, and how often the velocity is called."""

import pytest
import torch
from unirl.numerics.guidance import Guidance, guided_velocity

CONDITIONS = {"text": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
NEGATIVES = {"text": torch.tensor([[0.5, -1.0], [0.0, 1.0]])}
X, SIGMA = torch.tensor([[1.0, 1.0], [2.0, 2.0]]), torch.tensor([0.5, 0.25])


def counted():
    calls = []

    def velocity(x, sigma, conditions):
        calls.append(x.shape[0])
        return x * sigma[:, None] + conditions["text"]

    return velocity, calls


def guided(velocity, guidance, negatives=NEGATIVES, conditions=CONDITIONS):
    return guided_velocity(velocity, X, SIGMA, conditions=conditions, negatives=negatives, guidance=guidance)


def test_a_scale_of_1_is_one_forward_without_negatives():
    velocity, calls = counted()
    for mode in ("batched", "two-pass", "norm-corrected"):
        for negatives in (None, NEGATIVES):
            found = guided(velocity, Guidance(mode=mode), negatives)
            assert torch.equal(found, X * SIGMA[:, None] + CONDITIONS["text"])
    assert calls == [2] * 6
    assert Guidance(mode="two-pass").num_forwards == 1


@pytest.mark.parametrize(("mode", "calls_expected"), [("batched", [4]), ("two-pass", [2, 2])])
def test_guidance_extrapolates_from_the_negative(mode, calls_expected):
    velocity, calls = counted()
    guidance = Guidance(scale=3.0, mode=mode)
    # By hand: base + neg + 3 (pos - neg), base = x sigma = 0.5 for both rows.
    expected = torch.tensor([[0.5 + 0.5 + 1.5, 0.5 - 1 + 9.0], [0.5 + 0 + 9.0, 0.5 + 1 + 9.0]])
    torch.testing.assert_close(guided(velocity, guidance), expected, rtol=0, atol=0)  # exact binary fractions
    assert calls == calls_expected
    assert len(calls) == guidance.num_forwards


def test_norm_correction_keeps_the_norm_of_the_conditional_prediction():
    velocity, calls = counted()
    found = guided(velocity, Guidance(scale=3.0, mode="norm-corrected"))
    positive = X * SIGMA[:, None] + CONDITIONS["text"]
    plain = guided(velocity, Guidance(scale=3.0))
    torch.testing.assert_close(found.norm(dim=-1), positive.norm(dim=-1))  # fp32
    torch.testing.assert_close(torch.cosine_similarity(found, plain), torch.ones(2))  # the direction is unchanged
    assert calls[:2] == [2, 2]


def test_the_dims_of_the_norm_are_an_option():
    x, sigma = torch.ones(1, 3, 2, 2), torch.tensor([0.5])
    positive, negative = torch.randn(1, 3, 2, 2, generator=torch.Generator().manual_seed(0)), torch.zeros(1, 3, 2, 2)
    found = guided_velocity(
        lambda _x, _sigma, conditions: conditions["v"],
        x,
        sigma,
        conditions={"v": positive},
        negatives={"v": negative},
        guidance=Guidance(scale=4.0, mode="norm-corrected", norm_dims=(1,)),
    )
    # 4 times the positive, rescaled to the positive's norm per pixel, is the positive.
    torch.testing.assert_close(found, positive)


def test_a_combination_of_zero_stays_zero():
    found = guided_velocity(
        lambda _x, _sigma, conditions: conditions["v"],
        torch.zeros(1, 2),
        torch.tensor([0.5]),
        conditions={"v": torch.tensor([[1.0, 1.0]])},
        negatives={"v": torch.tensor([[2.0, 2.0]])},
        guidance=Guidance(scale=2.0, mode="norm-corrected"),
    )
    assert torch.equal(found, torch.zeros(1, 2))


def test_what_cannot_be_guided_is_refused():
    velocity, calls = counted()
    with pytest.raises(ValueError, match=r"scale = 4.5 needs negatives"):
        guided(velocity, Guidance(scale=4.5), None)
    with pytest.raises(ValueError, match="Give both the same keys"):
        guided(velocity, Guidance(scale=2.0), {"other": X})
    with pytest.raises(ValueError, match=r"'text' has shape \[2, 2\], its negative \[2, 1\].*two-pass"):
        guided(velocity, Guidance(scale=2.0), {"text": X[:, :1]})
    with pytest.raises(ValueError, match="finite number >= 0"):
        Guidance(scale=float("nan"))
    with pytest.raises(ValueError, match="mode 'rescaled' is not known"):
        Guidance(mode="rescaled")
    assert calls == []
