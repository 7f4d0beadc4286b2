"""Token log-probs: the numbers of a whole log-softmax and its autograd, in the memory of a chunk."""

import math

import pytest
import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from unirl.numerics.tokens.log_probs import output_logits, token_log_probs


def problem(num_tokens=7, width=5, num_words=11, *, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(num_words, width, generator=generator, dtype=torch.float64)
    bias = torch.randn(num_words, generator=generator, dtype=torch.float64)
    targets = torch.randint(num_words, (num_tokens,), generator=generator)
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype), targets


def whole(hidden, weight, targets, *, temperature=1.0, bias=None):
    """The definition, with all the logits."""
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    scores = (logits / temperature).log_softmax(dim=1)
    return scores.gather(1, targets[:, None]).squeeze(1), -(scores.exp() * scores).sum(dim=1)


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_numbers_and_gradients_are_those_of_the_whole_log_softmax(chunk):
    hidden, weight, bias, targets = (t.requires_grad_(t.is_floating_point()) for t in problem())
    expected = whole(hidden, weight, targets, temperature=0.7, bias=bias)
    result = token_log_probs(hidden, weight, targets, temperature=0.7, chunk=chunk, with_entropy=True, bias=bias)
    factors = torch.randn(2, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inputs = [hidden, weight, bias]
    theirs = torch.autograd.grad((torch.stack(expected) * factors).sum(), inputs)
    ours = torch.autograd.grad((torch.stack(result) * factors).sum(), inputs)
    for mine, other in zip((*result, *ours), (*expected, *theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)  # fp64, sums of at most 11 terms


def test_the_derivatives_are_those_of_finite_differences():
    hidden, weight, bias, targets = (t.requires_grad_(t.is_floating_point()) for t in problem(4, 3, 6))

    def both(hidden, weight, bias):
        return token_log_probs(hidden, weight, targets, temperature=1.3, chunk=3, with_entropy=True, bias=bias)

    assert torch.autograd.gradcheck(both, [hidden, weight, bias])


def test_one_output_alone_has_its_own_gradient():
    hidden, weight, _, targets = problem()
    hidden.requires_grad_()
    for index in (0, 1):
        result = token_log_probs(hidden, weight, targets, chunk=2, with_entropy=True)[index]
        expected = whole(hidden, weight, targets)[index]
        (mine,), (other,) = (torch.autograd.grad(x.sum(), [hidden]) for x in (result, expected))
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)  # fp64


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # Against fp64 on the same (rounded) inputs: fp32 sums of 64 products of order 1, and log-probs of order 10.
    # bf16 inputs lose nothing: their products are exact in fp32.
    [(torch.float32, 1e-5), (torch.bfloat16, 1e-5), (torch.float16, 1e-5)],
)
def test_the_results_are_fp32_whatever_the_inputs(dtype, tolerance):
    hidden, weight, bias, targets = problem(33, 64, 501, dtype=dtype)
    hidden, weight = hidden.mul(0.5).requires_grad_(), weight.mul(0.5).requires_grad_()
    log_probs, entropy = token_log_probs(hidden, weight, targets, chunk=5, with_entropy=True, bias=bias)
    assert log_probs.dtype == entropy.dtype == torch.float32
    doubles = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    expected = whole(*doubles, targets, bias=bias.double())
    for mine, other in zip((log_probs, entropy), expected, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=0, atol=tolerance)
    gradients = torch.autograd.grad(log_probs.sum() + entropy.sum(), [hidden, weight])
    references = torch.autograd.grad(expected[0].sum() + expected[1].sum(), doubles)
    for mine, other in zip(gradients, references, strict=True):
        assert mine.dtype == dtype
        # One rounding to the dtype at the end (eps of 1.2e-7, 7.8e-3, 9.8e-4), after sums in fp32.
        bound = torch.finfo(dtype).eps * other.abs() + 2e-5
        assert bool(((mine.double() - other).abs() <= bound).all())


def test_an_autocast_around_the_call_changes_nothing():
    hidden, weight, _, targets = problem(dtype=torch.float32)
    hidden.requires_grad_()
    plain, _ = token_log_probs(hidden, weight, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, _ = token_log_probs(hidden, weight, targets)
        (mine,) = torch.autograd.grad(cast.sum(), [hidden])
    assert torch.equal(plain, cast)
    assert torch.equal(mine, torch.autograd.grad(plain.sum(), [hidden])[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_of_a_sampler_are_those_that_are_scored(dtype):
    """Bit for bit, also under an autocast: fp32 sums of the inputs as they are."""
    hidden, weight, _, targets = problem(dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = output_logits(hidden, weight)
    assert logits.dtype == torch.float32
    # Inputs of order 1 and five addends: fp32 rounds the sum to 1e-6.
    torch.testing.assert_close(logits.double(), hidden.double() @ weight.double().T, rtol=0, atol=2e-6)
    scores = logits.log_softmax(dim=1).gather(1, targets[:, None]).squeeze(1)
    assert torch.equal(scores, token_log_probs(hidden, weight, targets)[0])


def test_the_chunk_decides_no_number():
    hidden, weight, _, targets = problem(64, 32, 101, dtype=torch.float32)
    results = [token_log_probs(hidden, weight, targets, chunk=chunk, with_entropy=True) for chunk in (None, 1, 7)]
    for other in results[1:]:
        # fp32: products of 32 factors in another order, logits of order 10.
        torch.testing.assert_close(torch.stack(other), torch.stack(results[0]), rtol=0, atol=2e-5)


class Largest(TorchDispatchMode):
    """The largest tensor that any operation returns, by elements; the same storage again is nothing new."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.numel = max(self.numel, tensor.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trains_weight", [False, True])
def test_memory_is_bounded_by_the_chunk_and_not_by_tokens_times_vocabulary(dtype, trains_weight):
    num_tokens, width, num_words, chunk = 40, 8, 1000, 4
    hidden, weight, _, targets = problem(num_tokens, width, num_words, dtype=dtype)
    hidden.requires_grad_()
    weight.requires_grad_(trains_weight)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        with Largest() as forward:
            log_probs, entropy = token_log_probs(hidden, weight, targets, chunk=chunk, with_entropy=True)
        loss = log_probs.sum() + entropy.sum()
    # What backward keeps is the inputs; whole logits would be 40,000.
    assert max(saved) == weight.numel() == 8000 and sum(saved) == hidden.numel() + weight.numel() + num_tokens
    assert forward.numel == chunk * num_words
    with Largest() as backward:
        loss.backward()
    gradient = weight.numel() if trains_weight else 0
    assert backward.numel == max(chunk * num_words, gradient)
    assert (weight.grad is not None) == trains_weight


def test_the_chunk_follows_from_the_budget(monkeypatch):
    monkeypatch.setattr("unirl.numerics.tokens.output_rows.LOGITS_BUDGET", 2500)
    hidden, weight, _, targets = problem(40, 8, 1000)
    with Largest() as largest:
        token_log_probs(hidden, weight, targets)
    assert largest.numel == 2000  # two rows of a thousand


def test_a_weight_without_gradient_gets_none():
    """As under LoRA, where the output projection is frozen."""
    hidden, weight, _, targets = problem()
    hidden.requires_grad_()
    log_probs, entropy = token_log_probs(hidden, weight, targets)
    log_probs.sum().backward()
    assert entropy is None and weight.grad is None and hidden.grad is not None
    assert not token_log_probs(hidden.detach(), weight, targets)[0].requires_grad


class Head(torch.nn.Linear):
    """An output projection that gives log-probs in place of logits."""

    def forward(self, hidden, targets):
        return token_log_probs(hidden, self.weight, targets, chunk=3, bias=self.bias)[0]


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_under_fsdp2_the_owner_of_the_weight_calls_it(one_rank):
    """The weight is gathered for its forward, freed, and gathered again for the backward, which reads it."""
    hidden, weight, bias, targets = problem(dtype=torch.float32)
    head = Head(5, 11)
    head.load_state_dict({"weight": weight, "bias": bias})
    fully_shard(head, mesh=one_rank, reshard_after_forward=True)
    hidden.requires_grad_()
    head(hidden, targets).sum().backward()
    plain = [t.clone().requires_grad_() for t in (hidden.detach(), weight, bias)]
    log_probs, _ = token_log_probs(plain[0], plain[1], targets, chunk=3, bias=plain[2])
    log_probs.sum().backward()
    # The same operations on the same numbers.
    assert torch.equal(hidden.grad, plain[0].grad)
    assert torch.equal(head.weight.grad.full_tensor(), plain[1].grad)
    assert torch.equal(head.bias.grad.full_tensor(), plain[2].grad)


def test_extreme_logits_stay_finite():
    hidden = torch.tensor([[1e4], [-1e4], [1e30], [0.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]])
    bias = torch.tensor([0.0, 0.0, -math.inf])  # a word that must not be sampled
    targets = torch.tensor([0, 1, 1, 0])
    log_probs, entropy = token_log_probs(hidden, weight, targets, with_entropy=True, bias=bias)
    assert log_probs.detach().tolist() == pytest.approx([0.0, 0.0, -2e30, -math.log(2)])
    assert entropy.detach().tolist() == pytest.approx([0.0, 0.0, 0.0, math.log(2)])
    (gradient,) = torch.autograd.grad(log_probs.sum() + entropy.sum(), [hidden])
    # Of the third, 1_t - p = (-1, 1): -1 - 1. Of the fourth, ½ and -½: ½ + ½.
    assert gradient.flatten().tolist() == pytest.approx([0.0, 0.0, -2.0, 1.0])


def test_no_tokens_give_no_log_probs_and_a_gradient_of_0():
    hidden, weight, _, targets = problem(0)
    hidden.requires_grad_()
    weight.requires_grad_()
    log_probs, entropy = token_log_probs(hidden, weight, targets, with_entropy=True)
    assert log_probs.shape == entropy.shape == (0,)
    log_probs.sum().backward()
    assert float(weight.grad.abs().max()) == 0 and hidden.grad.shape == (0, 5)


def test_what_does_not_fit_is_refused():
    hidden, weight, _, targets = problem()
    for token in (-1, 11):
        wrong = targets.index_fill(0, torch.tensor([4]), token)
        with pytest.raises(ValueError, match=f"target 4 is token {token}, the weight has 11 rows"):
            token_log_probs(hidden, weight, wrong)
    with pytest.raises(ValueError, match="temperature = 0"):
        token_log_probs(hidden, weight, targets, temperature=0.0)
    with pytest.raises(ValueError, match="chunk = 0"):
        token_log_probs(hidden, weight, targets, chunk=0)
    with pytest.raises(ValueError, match=r"weight \[11, 4\]"):
        token_log_probs(hidden, weight[:, :4], targets)
    with pytest.raises(ValueError, match="one per row of hidden"):
        token_log_probs(hidden, weight, targets[:3])
    with pytest.raises(ValueError, match=r"bias has shape \[3\]"):
        token_log_probs(hidden, weight, targets, bias=torch.zeros(3))


@pytest.mark.gpu
def test_bf16_on_a_gpu_is_fp32_in_its_sums():
    hidden, weight, _, targets = (t.cuda() for t in problem(33, 64, 501, dtype=torch.bfloat16))
    hidden, weight = hidden.mul(0.5).requires_grad_(), weight.mul(0.5).requires_grad_()
    log_probs, _ = token_log_probs(hidden, weight, targets, chunk=5)
    doubles = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    expected, _ = whole(*doubles, targets)
    torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=1e-5)  # fp32 sums of 64 exact products
    gradients = torch.autograd.grad(log_probs.sum(), [hidden, weight])
    references = torch.autograd.grad(expected.sum(), doubles)
    for mine, other in zip(gradients, references, strict=True):
        # The factors are rounded to bf16 (eps 7.8e-3), and so is the result.
        assert float((mine.double() - other).norm() / other.norm()) < 1e-2
