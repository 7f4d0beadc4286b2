"""One denoising step as a diagonal Gaussian.

Notation.  Rectified flow: x_sigma = (1 - sigma) x0 + sigma x1 with x1 ~ N(0, I), velocity v = x1 - x0.
A step goes from `sigma` down to `sigma_next`; dt = sigma_next - sigma < 0.  A one-step kernel is linear in
(x, v), so it is four numbers per row: mean = a x + b v, the std s of the transition, and the diffusion
coefficient g = s / sqrt(-dt).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

__all__ = [
    "Coefficients",
    "History",
    "Transition",
    "checked_sigmas",
    "euler_step",
    "on_rows",
    "score_corrected_euler",
]


@dataclass(frozen=True, kw_only=True)
class History:
    """State that a multistep kernel keeps from the previous step."""

    denoised: Tensor
    """[B, ...] fp32.  The estimate of x0 at the previous step."""
    sigma: Tensor
    """[B] fp32.  The sigma of that estimate."""


@dataclass(frozen=True, kw_only=True)
class Transition:
    """One step as a diagonal Gaussian, all in fp32."""

    mean: Tensor
    """[B, ...]."""
    std: Tensor
    """[B, 1, ...].  Standard deviation s of the emitted sample; 0 where the step is deterministic."""
    g: Tensor
    """[B, 1, ...].  Diffusion coefficient, s = g sqrt(-dt) for every kernel."""
    history: History | None = None
    """To pass to the next step's `transition`; None for one-step kernels."""


class Coefficients(NamedTuple):
    """Per-row numbers of a step, each [B] fp32: mean = on_x * x + on_velocity * v, noise std, diffusion g."""

    on_x: Tensor
    on_velocity: Tensor
    std: Tensor
    g: Tensor


def euler_step(x: Tensor, *, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """The deterministic next latent, x + (sigma_next - sigma) v, bit for bit as `EulerOde`.

    x, velocity: [B, ...].  sigma, sigma_next: [B].  Returns [B, ...] fp32.  Raises ValueError when the shapes do not
    fit.
    """
    sigma, sigma_next = checked_sigmas("euler", x, velocity, sigma, sigma_next)
    return x.float() + on_rows(sigma_next - sigma, x) * velocity.float()


def score_corrected_euler(sigma: Tensor, *, sigma_next: Tensor, g: Tensor) -> Coefficients:
    """Euler plus (g^2 / 2) dt (x + (1 - sigma) v) / sigma, the marginal-preserving SDE for any g.

    sigma, sigma_next, g: [B] fp32; g is finite and 0 or more.
    """
    dt = sigma_next - sigma
    correction = g.square() / (2.0 * sigma)
    return Coefficients(1.0 + correction * dt, (1.0 + correction * (1.0 - sigma)) * dt, g * (-dt).sqrt(), g)


def on_rows(values: Tensor, like: Tensor) -> Tensor:
    """[B] -> [B, 1, ...] with as many dims as `like`."""
    return values.view(-1, *(1,) * (like.ndim - 1))


def checked_sigmas(name: str, x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> tuple[Tensor, Tensor]:
    rows = (x.shape[0],)
    if velocity.shape != x.shape:
        raise ValueError(
            f"kernel '{name}': velocity has shape {list(velocity.shape)}, x has {list(x.shape)}. They must be equal."
        )
    if x.ndim < 2 or sigma.shape != rows or sigma_next.shape != rows:
        raise ValueError(
            f"kernel '{name}': x {list(x.shape)} needs sigma and sigma_next of shape {list(rows)}, one per "
            f"row; got {list(sigma.shape)} and {list(sigma_next.shape)}."
        )
    return sigma.float(), sigma_next.float()
