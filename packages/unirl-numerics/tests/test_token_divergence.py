"""Divergences of token distributions: torch's and scipy's numbers, autograd's gradients, in the memory of a chunk."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from unirl.core.roles import OutputHead
from unirl.numerics.tokens.divergence import dense_divergence, token_divergence

KINDS = ["forward", "reverse", "jensen"]


def problem(num_tokens=6, widths=(5, 3), num_words=11, *, dtype=torch.float64, seed=0):
    """Hidden states and projection of the student, those of the teacher, and targets."""
    random = torch.Generator().manual_seed(seed)
    shapes = [shape for width in widths for shape in ((num_tokens, width), (num_words, width))]
    hidden, weight, *theirs = (torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for shape in shapes)
    targets = torch.randint(num_words, (num_tokens,), generator=random)
    return hidden, weight, OutputHead(hidden=theirs[0], weight=theirs[1]), targets


def scores(hidden, weight, *, temperature=1.0):
    return (hidden @ weight.T / temperature).log_softmax(dim=1)


def by_torch(student, teacher, kind, beta):
    """From `torch.distributions`, over probabilities [T, K]."""
    one, other = (torch.distributions.Categorical(probs=probs) for probs in (student, teacher))
    kl = torch.distributions.kl_divergence
    if kind != "jensen":
        return kl(other, one) if kind == "forward" else kl(one, other)
    mixture = torch.distributions.Categorical(probs=beta * teacher + (1 - beta) * student)
    return beta * kl(other, mixture) + (1 - beta) * kl(one, mixture)


def lumped(probs, teacher, top_k):
    """The probabilities of the teacher's likeliest tokens, and of all others together."""
    words = teacher.argsort(dim=1, descending=True)[:, :top_k]
    kept = probs.gather(1, words)
    return torch.cat([kept, 1 - kept.sum(dim=1, keepdim=True)], dim=1)


@pytest.mark.parametrize("top_k", [None, 1, 4])
@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_torch_distributions(kind, chunk, top_k):
    hidden, weight, teacher, targets = problem()
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    settings = {"kind": kind, "beta": 0.3, "top_k": top_k, "temperature": 0.7}
    result, log_probs = token_divergence(hidden, weight, targets, teacher=teacher, chunk=chunk, **settings)
    student, other = scores(hidden, weight, temperature=0.7), scores(teacher.hidden, teacher.weight, temperature=0.7)
    probs = [student.exp(), other.exp()]
    if top_k is not None:
        probs = [lumped(each, other.exp(), top_k) for each in probs]
    expected = by_torch(*probs, kind, 0.3)
    factors = torch.randn(6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours, theirs = (torch.autograd.grad((value * factors).sum(), inputs) for value in (result, expected))
    for mine, reference in zip((result, *ours), (expected, *theirs), strict=True):
        # fp64: sums of 11 terms of order 1, but the rest of the mass is 1 less a sum there, good to 1e-16 of it.
        torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-12)
    assert not log_probs.requires_grad
    torch.testing.assert_close(log_probs, student.gather(1, targets[:, None]).squeeze(1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("top_k", [None, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_derivatives_are_those_of_finite_differences(kind, top_k):
    hidden, weight, teacher, targets = problem(4, (3, 2), 6)

    def values(hidden, weight):
        settings = {"kind": kind, "beta": 0.2, "top_k": top_k, "temperature": 1.3, "chunk": 3}
        return token_divergence(hidden, weight, targets, teacher=teacher, **settings)[0]

    assert torch.autograd.gradcheck(values, [hidden.requires_grad_(), weight.requires_grad_()])


def test_scipy_gives_the_same_numbers():
    special = pytest.importorskip("scipy.special")
    hidden, weight, teacher, _ = problem()
    student, other = scores(hidden, weight), scores(teacher.hidden, teacher.weight)
    p, q = student.exp().numpy(), other.exp().numpy()
    mixture = 0.1 * q + 0.9 * p
    expected = {
        "forward": special.rel_entr(q, p).sum(1),
        "reverse": special.rel_entr(p, q).sum(1),
        "jensen": 0.1 * special.rel_entr(q, mixture).sum(1) + 0.9 * special.rel_entr(p, mixture).sum(1),
    }
    for kind, values in expected.items():
        result = dense_divergence(student, other, kind=kind, beta=0.1)
        torch.testing.assert_close(result, torch.from_numpy(values), rtol=1e-12, atol=1e-13)  # fp64


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top_k", [None, 3])
def test_a_teacher_that_is_the_student_gives_zero_and_no_gradient(kind, top_k):
    """Exactly, in fp32 too: differences of equal numbers."""
    hidden, weight, _, targets = problem(dtype=torch.float32)
    teacher = OutputHead(hidden=hidden.clone(), weight=weight.clone())
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    result, _ = token_divergence(hidden, weight, targets, teacher=teacher, kind=kind, top_k=top_k, chunk=4)
    gradients = torch.autograd.grad(result.sum(), inputs)
    # The mixture of jensen is a logarithm of a sum, one rounding away.
    bound = 0.0 if kind == "reverse" else 1e-6
    assert max(float(value.detach().abs().max()) for value in (result, *gradients)) <= bound


@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_of_one_token_is_that_token(kind):
    """k = V - 1 leaves one token to the rest, so that nothing is lumped together; k = V and more leave none."""
    hidden, weight, teacher, _ = problem()
    student, other = scores(hidden, weight), scores(teacher.hidden, teacher.weight)
    full = dense_divergence(student, other, kind=kind)
    for top_k in (10, 11, 500):
        # fp64, in another order.
        torch.testing.assert_close(dense_divergence(student, other, kind=kind, top_k=top_k), full, rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_more_tokens_one_by_one_never_lower_the_divergence(kind):
    """The data processing inequality: what is lumped together can only look more alike."""
    hidden, weight, teacher, _ = problem()
    student, other = scores(hidden, weight), scores(teacher.hidden, teacher.weight)
    results = [dense_divergence(student, other, kind=kind, top_k=top_k) for top_k in range(1, 12)]
    assert (results[0] > 0).all()
    # 1e-12 for rounding of fp64.
    assert all(bool((after >= before - 1e-12).all()) for before, after in itertools.pairwise(results))


def test_jensen_tends_to_forward_and_reverse():
    """GKD, arXiv 2306.13649, section 2: JSD(beta) / beta -> KL(teacher || student) for beta -> 0, and by symmetry
    JSD(beta) / (1 - beta) -> KL(student || teacher) for beta -> 1."""
    hidden, weight, teacher, _ = problem()
    student, other = scores(0.5 * hidden, 0.5 * weight), scores(0.5 * teacher.hidden, 0.5 * teacher.weight)
    for beta, scale, kind in ((1e-6, 1e-6, "forward"), (1 - 1e-6, 1e-6, "reverse")):
        result = dense_divergence(student, other, kind="jensen", beta=beta) / scale
        # The next term of the expansion is beta times a chi-square divergence of order 1; cancellation leaves 1e-10.
        torch.testing.assert_close(result, dense_divergence(student, other, kind=kind), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top_k", [None, 2])
def test_far_apart_distributions_have_finite_gradients(kind, top_k):
    """Logits 200 apart: probabilities of 1e-87 are 0 in fp32, where P and Q underflow one by one."""
    hidden, weight, teacher, targets = problem(dtype=torch.float32)
    hidden = (100 * hidden).requires_grad_()
    far = OutputHead(hidden=-100 * teacher.hidden, weight=teacher.weight)
    result, _ = token_divergence(hidden, weight, targets, teacher=far, kind=kind, top_k=top_k)
    (gradient,) = torch.autograd.grad(result.sum(), [hidden])
    assert bool(result.isfinite().all()) and bool(gradient.isfinite().all()) and bool((result > 0).all())
    doubles = [value.detach().double() for value in (hidden, weight, far.hidden, far.weight)]
    doubles[0].requires_grad_()
    reference = OutputHead(hidden=doubles[2], weight=doubles[3])
    same, _ = token_divergence(*doubles[:2], targets, teacher=reference, kind=kind, top_k=top_k)
    # fp32 of logits of order 500.
    torch.testing.assert_close(result.double(), same, rtol=1e-4, atol=1e-4)
    (expected,) = torch.autograd.grad(same.sum(), [doubles[0]])
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-3, atol=1e-2)


def test_padding_of_a_vocabulary_is_left_out():
    hidden, weight, teacher, targets = problem()
    expected, _ = token_divergence(hidden, weight, targets, teacher=teacher, kind="reverse")
    padded = OutputHead(hidden=teacher.hidden, weight=torch.cat([teacher.weight, torch.ones(5, 3)]).double())
    longer = torch.cat([weight, torch.ones(3, 5)]).double().requires_grad_()
    for own, other in ((weight, padded), (longer, teacher)):
        result, _ = token_divergence(hidden, own, targets, teacher=other, kind="reverse")
        assert torch.equal(result, expected)
    (gradient,) = torch.autograd.grad(result.sum(), [longer])
    assert gradient[:11].abs().sum() > 0 and not gradient[11:].any()


def test_no_tensor_is_larger_than_a_chunk_of_logits():
    """64 rows in chunks of 4: forward and backward hold [4, V] at most, besides weights and their gradients."""
    hidden, weight, teacher, targets = problem(64, (3, 2), 50)
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            sizes.extend(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
            return result

    with Watch():
        for top_k in (None, 3):
            result, _ = token_divergence(hidden, weight, targets, teacher=teacher, kind="jensen", top_k=top_k, chunk=4)
            torch.autograd.grad(result.sum(), inputs)
    assert max(sizes) == max(4 * 50, 64 * 3)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"temperature": 0.0}, "got temperature 0.0, expected above 0"),
        ({"beta": 1.0}, "got beta 1.0, expected a number between 0 and 1"),
        ({"top_k": 0}, "got top_k 0, expected 1 or more"),
        ({"chunk": 0}, "got chunk 0, expected a number of rows"),
        (
            {"targets": torch.tensor([0, 1, 2, 3, 4, 11])},
            "got targets from 0 to 11, expected tokens of both models, 0 to",
        ),
        ({"targets": torch.tensor([0])}, "got 6 positions of the student, 6 of the teacher and 1 targets"),
        ({"teacher": OutputHead(hidden=torch.ones(6, 2), weight=torch.ones(11, 3))}, "the teacher's hidden has shape"),
    ],
)
def test_what_does_not_fit_is_refused(change, says):
    hidden, weight, teacher, targets = problem()
    given = {"targets": targets, "teacher": teacher, "kind": "jensen", **change}
    with pytest.raises(ValueError, match=says):
        token_divergence(hidden, weight, given.pop("targets"), **given)
