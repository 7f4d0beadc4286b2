"""Pre-training of the diffusion models of the quickstarts: optimizer, VAE, and flow matching."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["flow_matching_loss", "minimize", "parameter_rows", "share_rows", "train_vae", "warm_then_cosine"]


def minimize(
    parameters: Iterable[torch.nn.Parameter],
    loss_of: Callable[[int], Tensor],
    *,
    name: str,
    steps: int,
    learning_rate: float,
    weight_decay: float,
    print_every: int,
    report: Callable[[int], None] | None = None,
) -> None:
    """AdamW on `loss_of(step)` with the gradient clipped to 1; `report` is called after every 500 steps."""
    trained = list(parameters)
    optimizer = torch.optim.AdamW(trained, learning_rate, weight_decay=weight_decay)
    rate = warm_then_cosine(optimizer, steps=steps)
    started = time.monotonic()
    for step in range(steps):
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        rate.step()
        if step % print_every == 0:
            print(f"{name} {step} loss {loss.item():.4f} {time.monotonic() - started:.0f}s", flush=True)
        if report is not None and step and step % 500 == 0:
            report(step)


def warm_then_cosine(
    optimizer: torch.optim.Optimizer, *, steps: int, warm_steps: int = 50
) -> torch.optim.lr_scheduler.LambdaLR:
    def scale(step: int) -> float:
        warm = min(1.0, (step + 1) / warm_steps)
        return warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, scale)


def train_vae(vae: Any, images: Tensor, *, steps: int, batch: int, seed: int) -> None:
    """Trains on images in [0, 1] with L1, L2 and a little KL."""
    generator = torch.Generator().manual_seed(seed)

    def loss_of(step: int) -> Tensor:
        target = 2 * images[torch.randint(len(images), (batch,), generator=generator)] - 1
        posterior = vae.encode(target).latent_dist
        noise = torch.randn(posterior.mean.shape, generator=generator)
        output = vae.decode(posterior.mean + posterior.std * noise).sample
        kl = 0.5 * (posterior.mean**2 + posterior.var - 1 - posterior.logvar).mean()
        # A shape covers a tenth of the canvas; without the weight, black is a good answer for long.
        weight = 1 + 4 * (target.amax(dim=1, keepdim=True) > 0)
        return (weight * ((output - target).abs() + 0.5 * (output - target) ** 2)).mean() + 1e-4 * kl

    minimize(vae.parameters(), loss_of, name="vae", steps=steps, learning_rate=3e-3, weight_decay=0.0, print_every=100)


def flow_matching_loss(
    velocity: Callable[[Tensor, Tensor], Tensor], clean: Tensor, *, generator: torch.Generator, shift: float = 1.0
) -> Tensor:
    """Mean squared error of `velocity(x, sigma)` at x = (1 - sigma) clean + sigma noise, against noise - clean.

    clean: [N, ...].  sigma: [N], the sigmoid of a standard normal, as in arXiv 2403.03206, equation 19, shifted by
    equation 23.
    """
    sigma = torch.sigmoid(torch.randn(len(clean), generator=generator))
    if shift != 1.0:
        sigma = shift * sigma / (1 + (shift - 1) * sigma)
    noise = torch.randn(clean.shape, generator=generator)
    at = sigma.view(-1, *(1 for _ in clean.shape[1:]))
    return F.mse_loss(velocity((1 - at) * clean + at * noise, sigma), noise - clean)


def parameter_rows(components: dict[str, Any]) -> str:
    """Rows of a card's table: each module and the number of its parameters."""
    counts = {
        name: sum(parameter.numel() for parameter in part.parameters())
        for name, part in sorted(components.items())
        if isinstance(part, torch.nn.Module)
    }
    return "\n".join(f"| {name} | {count:,} |" for name, count in counts.items())


def share_rows(shares: dict[str, dict[str, float]]) -> str:
    """Rows of a card's table: each split and its numbers."""
    return "\n".join(
        f"| {split} | {' | '.join(f'{share:.3f}' for share in row.values())} |" for split, row in shares.items()
    )
