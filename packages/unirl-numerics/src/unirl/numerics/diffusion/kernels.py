"""Kernels of denoising steps: mean, noise and density of one step. Notation as in `transition`."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from unirl.core.limits import one_of

from .named import check_limits, class_of, made, name_of, options_of
from .transition import (
    Coefficients,
    History,
    Transition,
    checked_sigmas,
    euler_step,
    on_rows,
    score_corrected_euler,
)

__all__ = [
    "KERNELS",
    "Cps",
    "DanceSde",
    "DdimEta",
    "Dpm2",
    "EulerOde",
    "FlowSde",
    "Kernel",
    "OneStepKernel",
    "make_kernel",
]

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
_SINGULAR_WIDTH = 1e-6
"""Tolerance for sigma = 1, since 1.0 after fp32 arithmetic may be off by an ulp (6e-8)."""


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

        Raises ValueError for a deterministic kernel, which has no density, and for an x_next of another shape than the
        mean; on the CPU also for a step whose std is 0 or not finite. On another device such a step gives infinities or
        NaN, unless `check_density` has looked at the schedule before.
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

    def check_density(self, sigmas: Tensor, steps: Tensor) -> None:
        """Raises ValueError, as `log_prob` does on the CPU, unless these steps of a schedule have a density.

        sigmas: [T + 1] on the CPU.  steps: [K] int64.
        """
        sigma, sigma_next = sigmas[steps].float(), sigmas[steps + 1].float()
        x = sigma.new_zeros((len(steps), 1))
        step = self.transition(x, velocity=x, sigma=sigma, sigma_next=sigma_next, sigma_max=sigmas[1].float())
        self._std_of_density(x, step)

    def _std_of_density(self, x_next: Tensor, transition: Transition) -> Tensor:
        """[B], finite and above 0. On the CPU this is checked; elsewhere the host would wait for every step."""
        self._check_shape("x_next", x_next, transition)
        std = transition.std.flatten()
        is_read = std.device.type == "cpu"
        if self.is_stochastic and (not is_read or bool(((std > 0) & std.isfinite()).all())):
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
        sigma, sigma_next = checked_sigmas(self.name, x, velocity, sigma, sigma_next)
        step = self.coefficients(sigma, sigma_next=sigma_next, sigma_max=sigma_max)
        mean = on_rows(step.on_x, x) * x.float() + on_rows(step.on_velocity, x) * velocity.float()
        return Transition(mean=mean, std=on_rows(step.std, x), g=on_rows(step.g, x))


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
        sigma, sigma_next = checked_sigmas(self.name, x, velocity, sigma, sigma_next)
        x = x.float()
        denoised = x - on_rows(sigma, x) * velocity.float()
        # fp64: differences of lambda lose digits near sigma 0 and 1.
        now, after = sigma.double(), sigma_next.double()
        shrink = after / now
        # (1 - sigma') (1 - exp(-h)), finite at both ends of the schedule.
        weight = (1.0 - after) - (1.0 - now) * shrink
        mean = on_rows(shrink.float(), x) * x + on_rows(weight.float(), x) * denoised
        if history is not None:
            before = history.sigma.double()
            step = _log_snr(after) - _log_snr(now)
            previous_step = _log_snr(now) - _log_snr(before)
            # An infinite step: the last one (to sigma 0) stays first-order, and so does the one after sigma
            # 1.
            slope = torch.where(torch.isfinite(step), 0.5 * weight * step / previous_step, torch.zeros_like(weight))
            mean = mean + on_rows(slope.float(), x) * (denoised - history.denoised)
        zero = on_rows(torch.zeros_like(sigma), x)
        return Transition(mean=mean, std=zero, g=zero, history=History(denoised=denoised, sigma=sigma))


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


def _log_snr(sigma: Tensor) -> Tensor:
    return torch.log1p(-sigma) - torch.log(sigma)


def _mean_square(x_next: Tensor, mean: Tensor) -> Tensor:
    return (x_next.float() - mean).square().flatten(1).mean(dim=1)
