"""KL to the start, against PyTorch's own distributions."""

from __future__ import annotations

import torch
from torch.distributions import Categorical, Normal, kl_divergence
from unirl.core.roles import Replayed, ReplayedTokens
from unirl.league.start import StartPolicy, kl_of


def test_the_kl_of_a_path_is_that_of_its_steps_per_element() -> None:
    """Steps that a row does not have weigh nothing."""
    generator = torch.Generator().manual_seed(0)
    means, other = torch.randn(2, 2, 3, 4, 4, 4, generator=generator)
    std = torch.rand(2, 3, 1, 1, 1, generator=generator) + 0.1
    valid = torch.tensor([[True, True, True], [True, True, False]])

    def replayed(mean: torch.Tensor) -> Replayed:
        return Replayed(
            log_probs=torch.zeros(2, 3), means=mean, std=std, g=std, next=torch.zeros_like(mean), valid=valid
        )

    steps = kl_divergence(Normal(means, std), Normal(other, std)).mean(dim=(2, 3, 4))
    # fp32 means of 64 elements, summed in another order.
    torch.testing.assert_close(
        torch.tensor(kl_of(replayed(means), replayed(other))), (steps * valid).sum(dim=1).mean(), rtol=1e-5, atol=0
    )


def test_the_kl_of_text_is_estimated_from_its_tokens() -> None:
    """Tokens in the proportions of the policy itself give the exact value: k3 is unbiased."""
    now, start = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.2, 0.2, 0.6])
    tokens, valid = torch.tensor([[0, 0, 1, 2, 2]]), torch.tensor([[True, True, True, True, False]])

    def replayed(probs: torch.Tensor) -> ReplayedTokens:
        return ReplayedTokens(log_probs=probs.log()[tokens], entropy=None, valid=valid)

    expected = kl_divergence(Categorical(probs=now), Categorical(probs=start))
    # fp32 logarithms and exponentials of numbers of about 1.
    torch.testing.assert_close(torch.tensor(kl_of(replayed(now), replayed(start))), expected, rtol=1e-5, atol=1e-6)


def test_the_distance_is_relative_to_the_norm_of_the_start() -> None:
    module = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[3.0, 4.0]]))
        start = StartPolicy(module)
        assert start.distance() == 0
        module.weight.copy_(torch.tensor([[3.0, 5.0]]))
    # sqrt(1) / sqrt(9 + 16), of numbers that are exact in fp64.
    assert start.distance() == 0.2
