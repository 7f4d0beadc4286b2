"""Kernels of denoising steps: mean, noise and density of one step.

Notation.  Rectified flow: x_sigma = (1 - sigma) x0 + sigma x1 with x1 ~ N(0, I), velocity v = x1 - x0.
A step goes from `sigma` down to `sigma_next`; dt = sigma_next - sigma < 0.  A one-step kernel is linear in
(x, v), so it is four numbers per row: mean = a x + b v, the std s of the transition, and the diffusion
coefficient g = s / sqrt(-dt).
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from unirl.core.limits import one_of

from .named import check_limits, class_of, made, name_of, options_of

__all__ = [
    "KERNELS",
    "Coefficients",
    "Cps",
    "DanceSde",
    "DdimEta",
    "Dpm2",
    "EulerOde",
    "FlowSde",
    "History",
    "Kernel",
    "OneStepKernel",
    "Transition",
    "euler_step",
    "make_kernel",
    "score_corrected_euler",
]

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
_SINGULAR_WIDTH = 1e-6
"""Tolerance for sigma = 1, since 1.0 after fp32 arithmetic may be off by an ulp (6e-8)."""


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


@dataclass(frozen=True)
class Kernel(ABC):
    """A step rule.  Subclasses are frozen dataclasses; two equal kernels take equal steps.

    Plugins bring further ones, named `module:Class` in recipes. A field `eta` is `sampling.eta`; the other fields are
    the kernel's options, with limits as configs have them.
    """

    def __post_init__(self) -> None:
        check_limits(self, what=f"kernel '{self.name}'")

    @property
    def name(self) -> str:
        """Name in recipes: a short one, or `module:Class`."""
        return name_of(type(self), KERNELS)

    @property
    @abstractmethod
    def is_stochastic(self) -> bool:
        """Whether its steps draw noise, and therefore have a density."""

    @abstractmethod
    def transition(
        self,
        x: Tensor,
        *,
        velocity: Tensor,
        sigma: Tensor,
        sigma_next: Tensor,
        sigma_max: float | Tensor,
        history: History | None = None,
    ) -> Transition:
        """Distribution of the next latent given this one.

        x, velocity: [B, ...] of any rank and dtype; computed in fp32.  sigma, sigma_next: [B], one per row.
        sigma_max: stands in for sigma = 1 where a kernel is singular there; `sigmas[1]` of the schedule.
        history: of the previous step's Transition; one-step kernels ignore it.

        Raises ValueError for mismatched shapes.
        """

    def log_prob(self, x_next: Tensor, transition: Transition) -> Tensor:
        """Log-density of the emitted latent, averaged over elements.  Returns [B] fp32.

        x_next: [B, ...].  Averaging, not summing, keeps the scale of the ratio free of resolution; the true
        log-density of a row is this times its number of elements.

        Raises ValueError for a deterministic transition, which has no density, for a std that is not finite, and for
        an x_next of another shape than the mean.
        Source: Flow-GRPO, arXiv 2505.05470, the Gaussian of its SDE step.
        """
        std = self._std_of_density(x_next, transition)
        return -_mean_square(x_next, transition.mean) / (2.0 * std.square()) - std.log() - _HALF_LOG_2PI

    def sample(self, transition: Transition, noise: Tensor) -> Tensor:
        """The next latent, mean + std * noise.  noise: [B, ...] standard normal.  Returns [B, ...] fp32.

        Raises ValueError for noise of another shape than the mean.
        """
        self._check_shape("noise", noise, transition)
        return transition.mean + transition.std * noise.float()

    def ode_step(self, x: Tensor, *, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
        """The next latent of a row whose step is deterministic, in this kernel's parametrisation; Euler by default.

        Shapes as in `transition`.  Returns [B, ...] fp32.  Raises ValueError for mismatched shapes.
        """
        return euler_step(x, velocity=velocity, sigma=sigma, sigma_next=sigma_next)

    def _std_of_density(self, x_next: Tensor, transition: Transition) -> Tensor:
        """[B], finite and above 0."""
        self._check_shape("x_next", x_next, transition)
        std = transition.std.flatten()
        if self.is_stochastic and bool(((std > 0) & std.isfinite()).all()):
            return std
        if not self.is_stochastic or bool((std == 0).any()):
            raise ValueError(
                f"kernel '{self.name}': got a deterministic step (std = 0) to score, which has no "
                "density. Use a stochastic kernel with eta > 0, and for 'cps' and 'ddim-eta' leave out a "
                "last step that ends at sigma 0."
            )
        bad = next(float(value) for value in std if not 0 < float(value) < math.inf)
        raise ValueError(
            f"kernel '{self.name}': got a step with std = {bad} to score, expected a finite std above 0. "
            "Give each row a sigma_next below sigma."
        )

    def _check_shape(self, what: str, value: Tensor, transition: Transition) -> None:
        if value.shape != transition.mean.shape:
            raise ValueError(
                f"kernel '{self.name}': {what} has shape {list(value.shape)}, the mean has "
                f"{list(transition.mean.shape)}. They must be equal."
            )


@dataclass(frozen=True)
class OneStepKernel(Kernel):
    """A kernel whose step depends only on x, v and the two sigmas."""

    eta: float
    """Noise level; 0 is the deterministic limit."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.eta) and self.eta >= 0):
            raise ValueError(f"kernel '{self.name}': eta = {self.eta}; it must be a finite number >= 0.")
        super().__post_init__()

    @property
    def is_stochastic(self) -> bool:
        return self.eta > 0

    @abstractmethod
    def coefficients(self, sigma: Tensor, *, sigma_next: Tensor, sigma_max: float | Tensor) -> Coefficients:
        """The step's numbers per row.  sigma, sigma_next: [B] fp32."""

    def transition(
        self,
        x: Tensor,
        *,
        velocity: Tensor,
        sigma: Tensor,
        sigma_next: Tensor,
        sigma_max: float | Tensor,
        history: History | None = None,
    ) -> Transition:
        sigma, sigma_next = _checked_sigmas(self.name, x, velocity, sigma, sigma_next)
        step = self.coefficients(sigma, sigma_next=sigma_next, sigma_max=sigma_max)
        mean = _rows(step.on_x, x) * x.float() + _rows(step.on_velocity, x) * velocity.float()
        return Transition(mean=mean, std=_rows(step.std, x), g=_rows(step.g, x))


@dataclass(frozen=True)
class FlowSde(OneStepKernel):
    """Flow-GRPO's SDE: Euler plus half g^2 of the score, g = eta sqrt(sigma / (1 - sigma)).

    At sigma = 1, where g is infinite, 1 - sigma is taken at `sigma_max`: the first std is then exactly eta.
    Source: Flow-GRPO, arXiv 2505.05470, its SDE sampling step.
    """

    eta: float = 0.7

    def coefficients(self, sigma: Tensor, *, sigma_next: Tensor, sigma_max: float | Tensor) -> Coefficients:
        gap = torch.where(sigma >= 1.0 - _SINGULAR_WIDTH, 1.0 - sigma_max, 1.0 - sigma)
        g = self.eta * (sigma / gap).sqrt()
        return score_corrected_euler(sigma, sigma_next=sigma_next, g=g)


@dataclass(frozen=True)
class DanceSde(OneStepKernel):
    """DanceGRPO's SDE: the same drift as `FlowSde` with a constant g = eta.

    Source: DanceGRPO, arXiv 2505.07818, its rectified-flow SDE.
    """

    eta: float = 0.3

    def coefficients(self, sigma: Tensor, *, sigma_next: Tensor, sigma_max: float | Tensor) -> Coefficients:
        return score_corrected_euler(sigma, sigma_next=sigma_next, g=torch.full_like(sigma, self.eta))


@dataclass(frozen=True)
class Cps(OneStepKernel):
    """Coefficient-preserving sampling: the emitted latent keeps noise level sigma_next exactly.

    s = sigma_next sin(eta pi / 2); eta in [0, 1], and eta = 1 redraws all of the noise.  At sigma_next = 0
    the step is deterministic.
    Source: arXiv 2509.05952.
    """

    eta: float = 0.8
    constants: bool = True
    """False scores -mean (x' - mean)^2, as the published code does: no 1/(2 s^2), no normaliser, hence not
    a density."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eta > 1:
            raise ValueError(f"kernel 'cps': eta = {self.eta}; it must lie in [0, 1], where 1 is all noise.")

    def coefficients(self, sigma: Tensor, *, sigma_next: Tensor, sigma_max: float | Tensor) -> Coefficients:
        angle = self.eta * math.pi / 2.0
        std = sigma_next * math.sin(angle)
        # sqrt(sigma_next^2 - s^2), without the cancellation.
        kept = sigma_next * math.cos(angle)
        on_x = (1.0 - sigma_next) + kept
        on_velocity = kept * (1.0 - sigma) - (1.0 - sigma_next) * sigma
        return Coefficients(on_x, on_velocity, std, std / (sigma - sigma_next).sqrt())

    def log_prob(self, x_next: Tensor, transition: Transition) -> Tensor:
        if self.constants:
            return super().log_prob(x_next, transition)
        self._std_of_density(x_next, transition)
        return -_mean_square(x_next, transition.mean)


@dataclass(frozen=True)
class DdimEta(OneStepKernel):
    """DDIM with noise, for DDPM models; eta = 1 is ancestral sampling.

    Here a sigma is k = sqrt((1 - abar) / abar), the noise-to-signal ratio (`schedules.ddpm_sigmas`): the
    latent is (x0 + k e) / sqrt(1 + k^2), `velocity` is the model's prediction, and no table of abar is
    needed.  This form loses no digits of abar near pure noise, where sqrt(1 - abar) would.
    Source: DDIM, arXiv 2010.02502, equations 12 and 16.
    """

    eta: float = 1.0
    prediction: str = one_of("epsilon", "v", default="epsilon")
    """The model's prediction: the noise e, or v = sqrt(abar) e - sqrt(1 - abar) x0."""

    def coefficients(self, sigma: Tensor, *, sigma_next: Tensor, sigma_max: float | Tensor) -> Coefficients:
        signal = (1.0 + sigma.square()).rsqrt()
        signal_next = (1.0 + sigma_next.square()).rsqrt()
        ratio = sigma_next / sigma
        gap = ((sigma - sigma_next) * (sigma + sigma_next)).clamp_min(0.0).sqrt()
        std = self.eta * ratio * gap * signal_next
        direction = ((sigma_next * signal_next).square() - std.square()).clamp_min(0.0).sqrt()
        # mean = signal_next * x0_hat + direction * e_hat with x0_hat = x / signal - sigma * e_hat.
        on_x = signal_next / signal
        on_epsilon = direction - signal_next * sigma
        if self.prediction == "v":  # e_hat = signal * v + noise * x
            on_x, on_epsilon = on_x + on_epsilon * sigma * signal, on_epsilon * signal
        return Coefficients(on_x, on_epsilon, std, std / (sigma - sigma_next).sqrt())

    def ode_step(self, x: Tensor, *, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
        """Plain DDIM: Euler in these sigmas would need a latent that is not scaled by sqrt(abar)."""
        plain = dataclasses.replace(self, eta=0.0)
        return plain.transition(x, velocity=velocity, sigma=sigma, sigma_next=sigma_next, sigma_max=sigma).mean


@dataclass(frozen=True)
class EulerOde(OneStepKernel):
    """The plain sampler, x + dt v."""

    eta: float = dataclasses.field(default=0.0, init=False)

    def coefficients(self, sigma: Tensor, *, sigma_next: Tensor, sigma_max: float | Tensor) -> Coefficients:
        zero = torch.zeros_like(sigma)
        return Coefficients(torch.ones_like(sigma), sigma_next - sigma, zero, zero)


@dataclass(frozen=True)
class Dpm2(Kernel):
    """Deterministic two-step multistep solver on x0 in lambda = ln((1 - sigma) / sigma).

    The first step (no history) and a step that ends at sigma 0 are first-order.  Its state is
    `Transition.history`, which the caller passes back in.
    Source: DPM-Solver++(2M), arXiv 2211.01095, algorithm 2.
    """

    @property
    def is_stochastic(self) -> bool:
        return False

    def transition(
        self,
        x: Tensor,
        *,
        velocity: Tensor,
        sigma: Tensor,
        sigma_next: Tensor,
        sigma_max: float | Tensor,
        history: History | None = None,
    ) -> Transition:
        sigma, sigma_next = _checked_sigmas(self.name, x, velocity, sigma, sigma_next)
        x = x.float()
        denoised = x - _rows(sigma, x) * velocity.float()
        # fp64: differences of lambda lose digits near sigma 0 and 1.
        now, after = sigma.double(), sigma_next.double()
        shrink = after / now
        # (1 - sigma') (1 - exp(-h)), finite at both ends of the schedule.
        weight = (1.0 - after) - (1.0 - now) * shrink
        mean = _rows(shrink.float(), x) * x + _rows(weight.float(), x) * denoised
        if history is not None:
            before = history.sigma.double()
            step = _log_snr(after) - _log_snr(now)
            previous_step = _log_snr(now) - _log_snr(before)
            # An infinite step: the last one (to sigma 0) stays first-order, and so does the one after sigma
            # 1.
            slope = torch.where(torch.isfinite(step), 0.5 * weight * step / previous_step, torch.zeros_like(weight))
            mean = mean + _rows(slope.float(), x) * (denoised - history.denoised)
        zero = _rows(torch.zeros_like(sigma), x)
        return Transition(mean=mean, std=zero, g=zero, history=History(denoised=denoised, sigma=sigma))


def euler_step(x: Tensor, *, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """The deterministic next latent, x + (sigma_next - sigma) v, bit for bit as `EulerOde`.

    x, velocity: [B, ...].  sigma, sigma_next: [B].  Returns [B, ...] fp32.  Raises ValueError when the shapes do not
    fit.
    """
    sigma, sigma_next = _checked_sigmas("euler", x, velocity, sigma, sigma_next)
    return x.float() + _rows(sigma_next - sigma, x) * velocity.float()


KERNELS: Mapping[str, type[Kernel]] = {
    "flow-sde": FlowSde,
    "dance-sde": DanceSde,
    "cps": Cps,
    "ddim-eta": DdimEta,
    "euler": EulerOde,
    "dpm2": Dpm2,
}
"""Short name -> kernel."""


def make_kernel(name: str, *, eta: float | None = None, **options: Any) -> Kernel:
    """The kernel with this name, a short one or `module:Class`. `eta` None uses the kernel's default.

    options: further fields of the kernel, such as `constants` of 'cps' or `prediction` of 'ddim-eta'.

    Raises ValueError for a name that leads to no kernel, for an unknown option, for one out of its limits, and for an
    eta > 0 on a deterministic kernel.
    """
    cls = class_of(name, known=KERNELS, base=Kernel, what="kernel")
    has_eta = any(field.init and field.name == "eta" for field in dataclasses.fields(cls))
    if eta and not has_eta:
        raise ValueError(f"kernel '{name}': eta = {eta}, but it is deterministic. Leave eta out or set it to 0.")
    main = {"eta": float(eta)} if has_eta and eta is not None else {}
    return made(cls, main=main, known=options_of(cls, main="eta"), options=options, what=f"kernel '{name}'")


def score_corrected_euler(sigma: Tensor, *, sigma_next: Tensor, g: Tensor) -> Coefficients:
    """Euler plus (g^2 / 2) dt (x + (1 - sigma) v) / sigma, the marginal-preserving SDE for any g.

    sigma, sigma_next, g: [B] fp32; g is finite and 0 or more.
    """
    dt = sigma_next - sigma
    correction = g.square() / (2.0 * sigma)
    return Coefficients(1.0 + correction * dt, (1.0 + correction * (1.0 - sigma)) * dt, g * (-dt).sqrt(), g)


def _log_snr(sigma: Tensor) -> Tensor:
    return torch.log1p(-sigma) - torch.log(sigma)


def _mean_square(x_next: Tensor, mean: Tensor) -> Tensor:
    return (x_next.float() - mean).square().flatten(1).mean(dim=1)


def _rows(values: Tensor, like: Tensor) -> Tensor:
    """[B] -> [B, 1, ...] with as many dims as `like`."""
    return values.view(-1, *(1,) * (like.ndim - 1))


def _checked_sigmas(name: str, x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> tuple[Tensor, Tensor]:
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
