"""Advantages and returns of tokens from their rewards.

Tensors are [n, L], `valid` says which entries are tokens that were sampled. Rows may end anywhere, be padded on either
side and have holes (tool output): time goes from one valid token to the next, and invalid entries are skipped without
discount. Their results are 0, whatever the inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["TokenAdvantages", "gae", "rewards_to_go", "token_rewards"]


@dataclass(frozen=True, kw_only=True)
class TokenAdvantages:
    """Without gradient."""

    advantages: Tensor
    """[n, L]"""
    returns: Tensor
    """[n, L] advantages + values: the critic's value targets."""


def token_rewards(rewards: Tensor, valid: Tensor, *, kl: Tensor | None = None, kl_coefficient: float = 0.0) -> Tensor:
    """The reward of each sample at its last valid token, minus kl_coefficient * kl at every token.

    rewards: [n].  valid: [n, L] bool.  kl: [n, L] per token, mostly k1 of `kl.kl_estimate`.  Returns [n, L] fp32.
    The reward of a row without valid tokens is dropped.

    Raises ValueError for mismatched shapes, and for a coefficient without kl.
    Source: Ziegler et al., arXiv 1909.08593, equation 2, with the per-token penalty as the token's reward.
    """
    if valid.ndim != 2 or rewards.shape != valid.shape[:1] or (kl is not None and kl.shape != valid.shape):
        raise ValueError(
            f"token_rewards: rewards {list(rewards.shape)}, valid {list(valid.shape)}, "
            f"kl {None if kl is None else list(kl.shape)}; expected [n], [n, L] and [n, L]."
        )
    if kl is None and kl_coefficient:
        raise ValueError(f"token_rewards: kl_coefficient = {kl_coefficient}, but no kl was given.")
    # The last valid token has no other after it.
    after = valid.flip(1).cumsum(dim=1).flip(1)
    placed = torch.where(valid & (after == 1), rewards.detach().float()[:, None], 0.0)
    if kl is None:
        return placed
    return placed - kl_coefficient * torch.where(valid, kl.detach().float(), 0.0)


def rewards_to_go(rewards: Tensor, valid: Tensor, *, gamma: float = 1.0) -> Tensor:
    """G_t = r_t + gamma G_{t+1}, 0 after the end.

    rewards: [n, L].  valid: [n, L] bool.  gamma: in [0, 1].  Returns [n, L].
    With `token_rewards` including kl, and whitened over the batch, they are the advantages of REINFORCE++,
    arXiv 2501.03262.

    Raises ValueError for shapes that differ and for gamma outside [0, 1].
    """
    _check("rewards_to_go", rewards, valid, gamma=gamma)
    rewards = torch.where(valid, rewards.detach(), 0.0)
    result = torch.zeros_like(rewards)
    running = rewards.new_zeros(len(rewards))
    for column in range(rewards.shape[1] - 1, -1, -1):
        here = valid[:, column]
        running = torch.where(here, rewards[:, column] + gamma * running, running)
        result[:, column] = torch.where(here, running, 0.0)
    return result


def gae(
    rewards: Tensor, values: Tensor, valid: Tensor, *, gamma: float, lam: float, bootstrap: Tensor | None = None
) -> TokenAdvantages:
    """A_t = sum over k of (gamma lam)^k delta_{t+k}, with delta_t = r_t + gamma V_{t+1} - V_t.

    rewards, values: [n, L]; V_t is the critic's value before token t.  valid: [n, L] bool.  gamma, lam: in [0, 1].
    bootstrap: [n], the value after the last token, for truncated rows; None is 0, the value of a terminal state.

    Raises ValueError for mismatched shapes, and for gamma or lam outside [0, 1].
    Source: generalized advantage estimation, arXiv 1506.02438, equation 16.
    """
    _check("gae", rewards, valid, gamma=gamma, lam=lam)
    if values.shape != valid.shape or (bootstrap is not None and bootstrap.shape != valid.shape[:1]):
        raise ValueError(
            f"gae: values {list(values.shape)}, bootstrap {None if bootstrap is None else list(bootstrap.shape)}; "
            f"expected {list(valid.shape)} and [{len(valid)}]."
        )
    rewards = torch.where(valid, rewards.detach(), 0.0)
    values = torch.where(valid, values.detach(), 0.0)
    advantages = torch.zeros_like(values)
    running = values.new_zeros(len(values))
    after = running if bootstrap is None else bootstrap.detach().to(values.dtype)
    for column in range(values.shape[1] - 1, -1, -1):
        here = valid[:, column]
        delta = rewards[:, column] + gamma * after - values[:, column]
        running = torch.where(here, delta + gamma * lam * running, running)
        after = torch.where(here, values[:, column], after)
        advantages[:, column] = torch.where(here, running, 0.0)
    return TokenAdvantages(advantages=advantages, returns=advantages + values)


def _check(name: str, rewards: Tensor, valid: Tensor, **factors: float) -> None:
    if rewards.ndim != 2 or rewards.shape != valid.shape:
        raise ValueError(
            f"{name}: rewards {list(rewards.shape)}, valid {list(valid.shape)}; both must be the same [n, L]."
        )
    for factor, value in factors.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name}: {factor} = {value}; it must lie in [0, 1].")
