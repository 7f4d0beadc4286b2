"""One denoise step of every kernel from its paper's formula, in Python floats: what engines are held against.

Rectified flow: x = (1 - sigma) x0 + sigma x1, v = x1 - x0, so x0 = x - sigma v and x1 = x + (1 - sigma) v. A step goes
from sigma down to sigma', dt = sigma' - sigma < 0. It shares no code with `unirl.numerics.kernels`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["Step", "log_density", "multistep", "ode_step", "sde_step"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """A transition that is linear in x and v: mean = on_x x + on_velocity v."""

    on_x: float
    on_velocity: float
    std: float


def sde_step(kernel: str, *, sigma: float, after: float, second: float, eta: float, options: Mapping[str, Any]) -> Step:
    """The stochastic step of a kernel. second: the schedule's second sigma, which replaces 1 where g is infinite.

    Sources: Flow-GRPO, arXiv 2505.05470; DanceGRPO, arXiv 2505.07818; CPS, arXiv 2509.05952; DDIM, arXiv 2010.02502.
    """
    dt = after - sigma
    if kernel == "flow-sde":
        g2 = eta**2 * sigma / (1 - (second if sigma > 1 - 1e-6 else sigma))
        return Step(
            on_x=1 + g2 * dt / (2 * sigma),
            on_velocity=(1 + g2 * (1 - sigma) / (2 * sigma)) * dt,
            std=math.sqrt(g2 * -dt),
        )
    if kernel == "dance-sde":
        # Euler and half eta^2 of the score -(x - (1 - sigma) x0) / sigma^2.
        pull = eta**2 * dt / (2 * sigma**2)
        on_x0 = -pull * (1 - sigma)
        return Step(on_x=1 + pull + on_x0, on_velocity=dt - sigma * on_x0, std=eta * math.sqrt(-dt))
    if kernel == "cps":
        std = after * math.sin(eta * math.pi / 2)
        on_x0, on_x1 = 1 - after, math.sqrt(max(0.0, after**2 - std**2))
        return Step(on_x=on_x0 + on_x1, on_velocity=(1 - sigma) * on_x1 - sigma * on_x0, std=std)
    if kernel == "ddim-eta":
        return _ddim(sigma, after, eta=eta, prediction=options.get("prediction", "epsilon"))
    raise AssertionError(f"kernel {kernel!r} has no stochastic step among the formulas of conformance")


def ode_step(kernel: str, *, sigma: float, after: float, options: Mapping[str, Any]) -> Step:
    """The step that a kernel takes where it is not stochastic."""
    if kernel == "ddim-eta":
        return _ddim(sigma, after, eta=0.0, prediction=options.get("prediction", "epsilon"))
    return Step(on_x=1.0, on_velocity=after - sigma, std=0.0)


def multistep(
    x: Tensor, velocity: Tensor, *, sigma: float, after: float, before: tuple[Tensor, float] | None
) -> tuple[Tensor, tuple[Tensor, float]]:
    """The next latent of kernel `dpm2`, and what its next step is given as `before`: (x0, sigma).

    Source: DPM-Solver++(2M), arXiv 2211.01095, algorithm 2, with alpha = 1 - sigma and lambda = ln(alpha / sigma).
    First-order at the first step, at the step after sigma 1 (where lambda is infinite) and at the one that ends at 0.
    """
    x0 = x - sigma * velocity
    if after == 0:
        return x0, (x0, sigma)
    ratio = after / sigma
    # alpha' (1 - e^-h) with e^-h = (sigma' / alpha') (alpha / sigma).
    weight = (1 - after) - ratio * (1 - sigma)
    used = x0
    if before is not None and before[1] < 1 and sigma < 1:
        last, now, then = (math.log((1 - s) / s) for s in (before[1], sigma, after))
        used = x0 + (then - now) / (2 * (now - last)) * (x0 - before[0])
    return ratio * x + weight * used, (x0, sigma)


def log_density(kernel: str, x: Tensor, mean: Tensor, std: float, *, options: Mapping[str, Any]) -> Tensor:
    """[B] log-density of x [B, ...] under N(mean, std^2), averaged over the elements of a row."""
    square = (x - mean).square().flatten(1).mean(1)
    if kernel == "cps" and not options.get("constants", True):
        return -square
    return -square / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi)


def _ddim(k: float, after: float, *, eta: float, prediction: str) -> Step:
    """Equations 12 and 16, where a sigma is k = sqrt((1 - abar) / abar)."""
    abar, later = 1 / (1 + k**2), 1 / (1 + after**2)
    std = eta * math.sqrt((1 - later) / (1 - abar) * (1 - abar / later))
    on_x0, on_e = math.sqrt(later), math.sqrt(max(0.0, 1 - later - std**2))
    signal, noise = math.sqrt(abar), math.sqrt(1 - abar)
    if prediction == "v":  # x0 = signal x - noise v, e = noise x + signal v
        return Step(on_x=on_x0 * signal + on_e * noise, on_velocity=on_e * signal - on_x0 * noise, std=std)
    return Step(on_x=on_x0 / signal, on_velocity=on_e - on_x0 * noise / signal, std=std)
