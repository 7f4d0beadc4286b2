"""Guidance: the formula, and how often the velocity is called."""

from dataclasses import dataclass

import pytest
import torch
from unirl.core.limits import limit
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs, Turn
from unirl.numerics.diffusion.guidance import Cfg, Guidance, guided_velocity, make_guidance

CONDITIONS = {"text": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
NEGATIVES = {"text": torch.tensor([[0.5, -1.0], [0.0, 1.0]])}
X, SIGMA = torch.tensor([[1.0, 1.0], [2.0, 2.0]]), torch.tensor([0.5, 0.25])


def counted():
    calls = []

    def velocity(x, sigma, conditions):
        calls.append(x.shape[0])
        return x * sigma[:, None] + conditions["text"]

    return velocity, calls


def guided(velocity, guidance, negatives=NEGATIVES):
    conditions = {"positive": CONDITIONS, **({} if negatives is None else {"negative": negatives})}
    return guided_velocity(velocity, X, SIGMA, conditions=conditions, guidance=guidance)


def norm_corrected(positive, negative, *, scale=3.0):
    return guided_velocity(
        lambda _x, _sigma, conditions: conditions["v"],
        torch.zeros_like(positive),
        torch.full((len(positive),), 0.5),
        conditions={"positive": {"v": positive}, "negative": {"v": negative}},
        guidance=make_guidance("norm-corrected", scale=scale),
    )


def test_a_scale_of_1_is_one_forward_without_negatives():
    velocity, calls = counted()
    for mode in ("batched", "two-pass", "norm-corrected"):
        for negatives in (None, NEGATIVES):
            result = guided(velocity, make_guidance(mode), negatives)
            assert torch.equal(result, X * SIGMA[:, None] + CONDITIONS["text"])
    assert calls == [2] * 6
    assert make_guidance("two-pass").num_forwards == 1


@pytest.mark.parametrize(("mode", "calls_expected"), [("batched", [4]), ("two-pass", [2, 2])])
def test_guidance_extrapolates_from_the_negative(mode, calls_expected):
    velocity, calls = counted()
    guidance = make_guidance(mode, scale=3.0)
    # By hand: base + neg + 3 (pos - neg), base = x sigma = 0.5 for both rows.
    expected = torch.tensor([[0.5 + 0.5 + 1.5, 0.5 - 1 + 9.0], [0.5 + 0 + 9.0, 0.5 + 1 + 9.0]])
    torch.testing.assert_close(guided(velocity, guidance), expected, rtol=0, atol=0)  # exact binary fractions
    assert calls == calls_expected
    assert len(calls) == guidance.num_forwards


@pytest.mark.parametrize("mode", ["batched", "two-pass"])
def test_the_gradient_may_go_through_the_positive_branch_alone(mode):
    """Of v = 3 w + 4.5 (2 w - 3 w): -1.5 in w, and 4.5 x 2 without what the negative branch adds."""
    w, ones, calls = torch.tensor(0.7, requires_grad=True), torch.ones(1, 1), []

    def velocity(x, _sigma, conditions):
        calls.append(len(x))
        return w * conditions["factor"]

    for only_positive, slope, forwards in (
        (False, -1.5, [2] if mode == "batched" else [1, 1]),
        (True, 9.0, [1, 1]),
    ):
        calls.clear()
        result = guided_velocity(
            velocity,
            ones,
            torch.tensor([0.5]),
            conditions={"positive": {"factor": 2 * ones}, "negative": {"factor": 3 * ones}},
            guidance=make_guidance(mode, scale=4.5),
            only_positive=only_positive,
        )
        # fp32 sums of three numbers of order 1 to 10.
        assert float(result.detach()) == pytest.approx(-1.5 * 0.7, abs=1e-5)
        assert float(torch.autograd.grad(result.sum(), w)[0]) == pytest.approx(slope, abs=1e-5)
        assert calls == forwards


@pytest.mark.parametrize("mode", ["batched", "two-pass"])
def test_ragged_conditions_are_guided_row_by_row(mode):
    """Tensors of any shape, here of a different length in each row and branch: a row sees the sum of its own."""

    def velocity(x, sigma, conditions):
        return x * sigma[:, None] + torch.stack([patches.sum(dim=0) for patches in conditions["patches"]])

    conditions = {
        "positive": {"patches": (torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 1.0], [2.0, 3.0]]))},
        "negative": {"patches": (torch.tensor([[0.25, -0.5], [0.25, -0.5]]), torch.tensor([[0.0, 1.0]]))},
    }
    # The sums are those of CONDITIONS and NEGATIVES, for which the test above has the result by hand.
    expected = torch.tensor([[0.5 + 0.5 + 1.5, 0.5 - 1 + 9.0], [0.5 + 0 + 9.0, 0.5 + 1 + 9.0]])
    guidance = make_guidance(mode, scale=3.0)
    result = guided_velocity(velocity, X, SIGMA, conditions=conditions, guidance=guidance)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)  # exact binary fractions


@pytest.mark.parametrize(("shape", "dims"), [((2, 3, 2, 2), (1,)), ((2, 4, 3), (-1,)), ((2, 3, 2, 2, 2), (1,))])
def test_the_norm_is_taken_at_each_place_of_each_row(shape, dims):
    generator = torch.Generator().manual_seed(0)
    positive, negative = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    positive[1] *= 100  # a norm over rows would show
    result = norm_corrected(positive, negative)
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
    result = norm_corrected(positive, negative)
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


@pytest.mark.parametrize(
    ("name", "options", "scales"),
    [
        # Guided where low < sigma <= high; sigmas are 1, 0.75, 0.5, 0.25.
        ("interval", {"low": 0.25, "high": 0.75}, [1.0, 3.0, 3.0, 1.0]),
        # From the boundary on the high scale, below it the low one.
        ("two-scale", {"scale_low": 2.0, "boundary": 0.75}, [3.0, 3.0, 2.0, 2.0]),
    ],
)
def test_the_scale_depends_on_the_sigma_of_each_row(name, options, scales):
    generator = torch.Generator().manual_seed(2)
    positive, negative = torch.randn(4, 2, 3, generator=generator), torch.randn(4, 2, 3, generator=generator)
    guidance = make_guidance(name, scale=3.0, **options)
    result = guided_velocity(
        lambda _x, _sigma, conditions: conditions["v"],
        torch.zeros_like(positive),
        torch.tensor([1.0, 0.75, 0.5, 0.25]),
        conditions={"positive": {"v": positive}, "negative": {"v": negative}},
        guidance=guidance,
    )
    p, n, scale = positive.double(), negative.double(), torch.tensor(scales).double()[:, None, None]
    # Three roundings of fp32, 2^-24 each, of numbers up to 3 |p - n| + |n|.
    torch.testing.assert_close(result.double(), n + scale * (p - n), rtol=0, atol=3 * 2.0**-24 * 4 * 8)
    off = torch.tensor(scales) == 1.0
    assert torch.equal(result[off], positive[off])
    assert guidance.num_forwards == 2


@pytest.mark.parametrize("renorm", ["none", "global", "channel", "text-channel"])
@pytest.mark.parametrize(("scale", "image_scale"), [(4.0, 1.5), (4.0, 1.0), (1.0, 1.5)])
@pytest.mark.parametrize("shape", [(3, 2, 4, 5), (3, 5, 2)])
def test_text_and_images_guide_with_a_scale_each(renorm, scale, image_scale, shape):
    """Each row by itself, in fp64; the first is above the interval, and the last so large that a norm over rows would
    show. Channels: dim 1 of four dims, the last of three."""
    generator = torch.Generator().manual_seed(3)
    v, text, image = (torch.randn(shape, generator=generator) for _ in range(3))
    for one in (v, text, image):
        one[2] *= 100
    options = {"image_scale": image_scale, "renorm": renorm, "renorm_least": 0.3, "low": 0.4, "high": 0.9}
    guidance = make_guidance("text-image", scale=scale, **options)
    expected_branches = ["positive", *(["negative"] if scale != 1 else []), *(["no-image"] if image_scale != 1 else [])]
    assert list(guidance.branches) == expected_branches
    result = guided_velocity(
        lambda _x, _sigma, conditions: conditions["v"],
        torch.zeros_like(v),
        torch.tensor([1.0, 0.9, 0.5]),
        conditions={"positive": {"v": v}, "negative": {"v": text}, "no-image": {"v": image}},
        guidance=guidance,
    )
    assert torch.equal(result[0], v[0])
    for row in (1, 2):
        p, n, i = (one[row].double() for one in (v, text, image))
        channel = 0 if len(shape) == 4 else -1

        def factor(w, dim, p=p):
            norms = (p.square().sum(dim, keepdim=True) / w.square().sum(dim, keepdim=True)).sqrt()
            return norms.clamp(0.3, 1)

        w = n + scale * (p - n)
        if renorm == "text-channel":
            w = w * factor(w, channel)
        w = i + image_scale * (w - i)
        if renorm == "channel":
            w = w * factor(w, channel)
        if renorm == "global":
            w = w * factor(w, tuple(range(p.ndim)))
        # fp32 sums of numbers up to some hundred.
        torch.testing.assert_close(result[row].double(), w, rtol=1e-5, atol=1e-6 * float(w.abs().max()))


def test_the_branch_without_images_keeps_the_text_and_neither_has_turns():
    media, turns = (MediaRef(modality="image", role="source", uri="a.png"),), (Turn(stage="plan", tokens=(1,)),)
    inputs = Inputs(ids=("a",), prompts=("red",), texts=("red",), media=(media,), turns=(turns,))
    guidance = make_guidance("text-image", scale=4.0, image_scale=2.0)
    without = {branch: guidance.inputs(branch, inputs, negative_prompt="") for branch in guidance.branches}
    assert without["positive"] is inputs
    assert (without["negative"].texts, without["negative"].media, without["negative"].turns) == (("",), (media,), None)
    assert (without["no-image"].texts, without["no-image"].media, without["no-image"].turns) == (("red",), ((),), None)


@dataclass(frozen=True, kw_only=True)
class TextAndImage(Guidance):
    """Three branches with a scale each, as models that edit images have them."""

    image_scale: float = limit(2.0, least=0)

    @property
    def branches(self):
        return ("positive", "without_text", "without_image")

    def combine(self, velocities, sigma):
        p, text, image = (velocities[branch] for branch in self.branches)
        return p + (self.scale - 1) * (p - text) + (self.image_scale - 1) * (p - image)


@pytest.mark.parametrize("batched", [False, True])
def test_a_guidance_of_three_branches_gets_the_velocity_of_each(batched):
    velocity, calls = counted()
    guidance = make_guidance(f"{__name__}:TextAndImage", scale=3.0, image_scale=1.5)
    kind = type("Batched", (TextAndImage,), {"is_batched": True}) if batched else TextAndImage
    guidance = kind(scale=3.0, image_scale=1.5)
    values = {"positive": [1.0, 2.0], "without_text": [0.5, 4.0], "without_image": [3.0, -1.0]}
    conditions = {branch: {"text": torch.tensor([row, row])} for branch, row in values.items()}
    result = guided_velocity(velocity, X, SIGMA, conditions=conditions, guidance=guidance)
    # base + p + 2 (p - text) + 0.5 (p - image), base = x sigma = 0.5: exact binary fractions.
    expected = torch.tensor([[0.5 + 1 + 1 - 1, 0.5 + 2 - 4 + 1.5]] * 2)
    assert torch.equal(result, expected)
    assert calls == ([6] if batched else [2, 2, 2])
    assert guidance.num_forwards == len(calls)


class NoBranch(Cfg):
    branches = ("negative",)


def test_what_cannot_be_guided_is_refused():
    velocity, calls = counted()
    with pytest.raises(ValueError, match=r"'batched': needs conditions 'positive', 'negative'; 'negative' is missing"):
        guided(velocity, make_guidance("batched", scale=4.5), None)
    with pytest.raises(ValueError, match="Give both the same keys"):
        guided(velocity, make_guidance("batched", scale=2.0), {"other": X})
    with pytest.raises(ValueError, match=r"'text' has shape \[2, 2\] in 'positive' and \[2, 1\] in .*two-pass"):
        guided(velocity, make_guidance("batched", scale=2.0), {"text": X[:, :1]})
    with pytest.raises(ValueError, match="'batched': scale: got nan, expected a finite number, 0 or more"):
        make_guidance("batched", scale=float("nan"))
    with pytest.raises(ValueError, match="guidance 'rescaled' is not known; choose one of batched, two-pass"):
        make_guidance("rescaled")
    with pytest.raises(ValueError, match="expected low < high"):
        make_guidance("interval", scale=2.0, low=0.5, high=0.25)
    with pytest.raises(ValueError, match="expected different ones with 'positive' among them"):
        make_guidance(f"{__name__}:NoBranch", scale=2.0)
    assert calls == []
