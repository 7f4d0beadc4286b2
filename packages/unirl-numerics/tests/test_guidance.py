"""Guidance: the formula, and how often the velocity is called."""

import pytest
import torch
from unirl.numerics.diffusion.guidance import Guidance, guided_velocity

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


def norm_corrected(positive, negative, *, dims, scale=3.0):
    return guided_velocity(
        lambda _x, _sigma, conditions: conditions["v"],
        torch.zeros_like(positive),
        torch.full((len(positive),), 0.5),
        conditions={"v": positive},
        negatives={"v": negative},
        guidance=Guidance(scale=scale, mode="norm-corrected", norm_dims=dims),
    )


def test_a_scale_of_1_is_one_forward_without_negatives():
    velocity, calls = counted()
    for mode in ("batched", "two-pass", "norm-corrected"):
        for negatives in (None, NEGATIVES):
            result = guided(velocity, Guidance(mode=mode), negatives)
            assert torch.equal(result, X * SIGMA[:, None] + CONDITIONS["text"])
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
    result = guided(velocity, Guidance(scale=3.0, mode="norm-corrected"))
    positive = X * SIGMA[:, None] + CONDITIONS["text"]
    plain = guided(velocity, Guidance(scale=3.0))
    torch.testing.assert_close(result.norm(dim=-1), positive.norm(dim=-1))  # fp32
    torch.testing.assert_close(torch.cosine_similarity(result, plain), torch.ones(2))  # the direction is unchanged
    assert calls[:2] == [2, 2]


@pytest.mark.parametrize(("shape", "dims"), [((2, 3, 2, 2), (1,)), ((2, 4, 3), (-1,)), ((2, 3, 2, 2, 2), (1,))])
def test_the_norm_is_taken_at_each_place_of_each_row(shape, dims):
    generator = torch.Generator().manual_seed(0)
    positive, negative = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    positive[1] *= 100  # a norm over rows would show
    result = norm_corrected(positive, negative, dims=dims)
    # Channel vectors one by one, in fp64.
    vectors = [value.double().movedim(dims[0], -1).reshape(-1, 3) for value in (positive, negative, result)]
    for p, n, vector in zip(*vectors, strict=True):
        combined = n + 3.0 * (p - n)
        expected = combined * (p.square().sum() / combined.square().sum()).sqrt()
        torch.testing.assert_close(vector, expected, rtol=1e-5, atol=1e-6)  # fp32


def test_norm_correction_has_a_gradient_where_a_norm_is_zero():
    """Rows: neither is 0; the conditional velocity is; the combination is (n + 3 (p - n) with p = 2, n = 3); both are."""
    positive = torch.tensor([[[1.0, 2.0]], [[0.0, 0.0]], [[2.0, 4.0]], [[0.0, 0.0]]], requires_grad=True)
    negative = torch.tensor([[[0.5, -1.0]], [[1.0, 3.0]], [[3.0, 6.0]], [[0.0, 0.0]]], requires_grad=True)
    result = norm_corrected(positive, negative, dims=(-1,))
    assert not result[1:].detach().any()
    pull = torch.tensor([0.3, -0.7])
    (result * pull).sum().backward()
    # Where |p| c / |c| has no derivative, its subgradient 0 is taken.
    assert not positive.grad[1:].any() and not negative.grad[1:].any()
    p, n = (value[0].detach().double().requires_grad_() for value in (positive, negative))
    combined = n + 3.0 * (p - n)
    (combined * (p.norm() / combined.norm()) * pull.double()).sum().backward()
    for mine, other in ((positive, p), (negative, n)):
        torch.testing.assert_close(mine.grad[0].double(), other.grad, rtol=1e-5, atol=1e-6)  # fp32


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
