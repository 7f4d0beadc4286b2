"""Sigma schedules: [T + 1] numbers that fall from 1 to 0, computed in fp64 and returned in fp32.

A step i goes from sigmas[i] to sigmas[i + 1].  A recipe names its schedule; the request carries the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Grid = NDArray[np.float64]
Variant = Literal["exact", "diffusers-default"]
MuRule = Literal["linear", "flux2"]
TimeShift = Literal["exponential", "linear"]

_REFUSED = ("use_karras_sigmas", "use_beta_sigmas", "use_exponential_sigmas", "invert_sigmas")
_EULER = "FlowMatchEulerDiscreteScheduler"
_UNIPC = "UniPCMultistepScheduler"
_HONOURED_USES = {_EULER: ("use_dynamic_shifting",), _UNIPC: ("use_dynamic_shifting", "use_flow_sigmas")}
_UNIPC_FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "final_sigmas_type": "zero"}
"""Settings under which UniPC integrates a velocity over sigmas that end in 0."""


def static_sigmas(num_steps: int, *, shift: float) -> Tensor:
    """A uniform grid from 1 to 0, shifted once: s t / (1 + (s - 1) t).  Returns [num_steps + 1] fp32.

    Source: Stable Diffusion 3, arXiv 2403.03206, section 5.3.2 (resolution-dependent shift).
    """
    _check_num_steps(num_steps)
    return _terminated(_static_shift(_uniform(num_steps), shift=shift))


def dynamic_sigmas(num_steps: int, *, mu: float, time_shift_type: TimeShift = "exponential") -> Tensor:
    """A uniform grid from 1 to 0, shifted by `mu`, as models with resolution-dependent shift use it.

    Returns [num_steps + 1] fp32.  Source: diffusers FlowMatchEulerDiscreteScheduler, `use_dynamic_shifting`.
    """
    _check_num_steps(num_steps)
    return _terminated(_time_shift(_uniform(num_steps), mu=mu, kind=time_shift_type))


def linear_mu(
    image_seq_len: int,
    *,
    base_shift: float = 0.5,
    max_shift: float = 1.15,
    base_image_seq_len: int = 256,
    max_image_seq_len: int = 4096,
) -> float:
    """The dynamic shift, on the line through (base length, base shift) and (max length, max shift).

    image_seq_len: latent tokens after patching.  Source: FLUX.1, `calculate_shift` in diffusers.
    """
    slope = (max_shift - base_shift) / (max_image_seq_len - base_image_seq_len)
    return base_shift + slope * (image_seq_len - base_image_seq_len)


def flux2_mu(image_seq_len: int, *, num_steps: int) -> float:
    """FLUX.2's fitted dynamic shift, which depends on the number of steps up to 4,300 tokens.

    Two lines in the length, fitted at 10 and at 200 steps; linear in the steps between (and beyond).
    Source: `compute_empirical_mu` of the FLUX.2 pipeline in diffusers.
    """
    at_200 = 0.00016927 * image_seq_len + 0.45666666
    if image_seq_len > 4300:
        return at_200
    at_10 = 8.73809524e-05 * image_seq_len + 1.89833333
    return at_10 + (at_200 - at_10) * (num_steps - 10) / 190.0


def sigmas_from_scheduler_config(
    config: Mapping[str, object],
    *,
    num_steps: int,
    image_seq_len: int | None = None,
    shift: float | None = None,
    variant: Variant = "exact",
    mu_rule: MuRule = "linear",
) -> Tensor:
    """The schedule of a checkpoint's `scheduler_config.json`.  Returns [num_steps + 1] fp32.

    config: of a FlowMatchEulerDiscreteScheduler, or of a UniPCMultistepScheduler for flows, whose solver is not used;
    absent keys take diffusers' defaults.
    image_seq_len: latent tokens after patching; needed if the config shifts dynamically.
    shift: a static shift that replaces the checkpoint's, dynamic ones too.  `shift_terminal` still holds.
    variant: "exact" shifts linspace(1, 1/T, T) once.  "diffusers-default" is the result of `set_timesteps(T)`
    without sigmas: the Euler scheduler's grid ends at the smallest training sigma, and a static shift is applied
    twice (https://github.com/huggingface/diffusers/issues/13243); UniPC's ends one step before it.  Only for
    reproducing papers trained with it.  UniPC begins at 1 - 1e-6, for the logarithms of its solver; here it is 1, since
    SDE kernels divide by 1 - sigma.
    mu_rule: how the dynamic shift depends on the length.  Defined by the pipeline, not by the config.

    Raises ValueError for an unsupported scheduler or option, and for a missing `image_seq_len`.
    """
    _check_num_steps(num_steps)
    _refuse_what_is_not_honoured(config)
    is_dynamic = shift is None and bool(config.get("use_dynamic_shifting"))
    is_unipc = config.get("_class_name") == _UNIPC
    static_shift = _number(config, "flow_shift" if is_unipc else "shift", 1.0) if shift is None else shift
    grid = _uniform(num_steps)
    if variant == "diffusers-default":
        smallest = np.array([1.0 / _number(config, "num_train_timesteps", 1000.0)])
        if not is_dynamic and not is_unipc:
            smallest = _static_shift(smallest, shift=static_shift)
        grid = np.linspace(1.0, float(smallest[0]), num_steps + is_unipc)[:num_steps]
    elif variant != "exact":
        raise ValueError(f"schedule variant '{variant}' is not known; choose exact or diffusers-default.")
    if is_dynamic:
        mu = _mu_of_config(config, image_seq_len=image_seq_len, num_steps=num_steps, rule=mu_rule)
        kind = config.get("time_shift_type", "exponential")
        if kind not in ("exponential", "linear"):
            raise ValueError(f"scheduler config: time_shift_type '{kind}' is not known; choose exponential or linear.")
        grid = _time_shift(grid, mu=mu, kind=kind)
    else:
        grid = _static_shift(grid, shift=static_shift)
    terminal = _number(config, "shift_terminal", 0.0)
    if terminal:
        grid = _stretch_to_terminal(grid, terminal=terminal)
    return _terminated(grid)


def ddpm_sigmas(alphas_bar: Sequence[float], *, timesteps: Sequence[int], final_alpha_bar: float = 1.0) -> Tensor:
    """Noise-to-signal ratios sqrt((1 - abar) / abar), the sigmas of the 'ddim-eta' kernel.

    alphas_bar: the training table, falling.  timesteps: [T] falling indices into it.  final_alpha_bar: abar
    after the last step: 1, or alphas_bar[0] for a scheduler with `set_alpha_to_one = false`.
    Returns [T + 1] fp32; these are not in [0, 1].
    """
    kept = np.array([*(alphas_bar[t] for t in timesteps), final_alpha_bar], dtype=np.float64)
    return torch.tensor(np.sqrt((1.0 - kept) / kept), dtype=torch.float32)


def _uniform(num_steps: int) -> Grid:
    return np.linspace(1.0, 1.0 / num_steps, num_steps)


def _static_shift(grid: Grid, *, shift: float) -> Grid:
    if not (math.isfinite(shift) and shift > 0):
        raise ValueError(
            f"schedule: shift = {shift}; it must be a finite number > 0, where 1 leaves the grid as it is."
        )
    return shift * grid / (1.0 + (shift - 1.0) * grid)


def _time_shift(grid: Grid, *, mu: float, kind: TimeShift) -> Grid:
    strength = math.exp(mu) if kind == "exponential" else mu
    return strength / (strength + (1.0 / grid - 1.0))


def _stretch_to_terminal(grid: Grid, *, terminal: float) -> Grid:
    """Scale 1 - sigma so that the last sigma before 0 is `terminal`."""
    if len(grid) == 1:
        raise ValueError(
            f"schedule: shift_terminal = {terminal} cannot move the only sigma of a 1-step schedule, which "
            "is 1. Use at least 2 steps."
        )
    return 1.0 - (1.0 - grid) * (1.0 - terminal) / (1.0 - grid[-1])


def _mu_of_config(config: Mapping[str, object], *, image_seq_len: int | None, num_steps: int, rule: MuRule) -> float:
    if image_seq_len is None:
        raise ValueError(
            "schedule: the scheduler config has use_dynamic_shifting = true, so image_seq_len is needed "
            "(latent tokens after patching). Pass it, or pass a static `shift`."
        )
    if rule == "flux2":
        return flux2_mu(image_seq_len, num_steps=num_steps)
    if rule != "linear":
        raise ValueError(f"schedule: mu_rule '{rule}' is not known; choose linear or flux2.")
    return linear_mu(
        image_seq_len,
        base_shift=_number(config, "base_shift", 0.5),
        max_shift=_number(config, "max_shift", 1.15),
        base_image_seq_len=int(_number(config, "base_image_seq_len", 256)),
        max_image_seq_len=int(_number(config, "max_image_seq_len", 4096)),
    )


def _refuse_what_is_not_honoured(config: Mapping[str, object]) -> None:
    scheduler = str(config.get("_class_name", _EULER))
    if scheduler not in _HONOURED_USES:
        raise ValueError(
            f"scheduler config: _class_name '{scheduler}' is not honoured, only {_EULER} and {_UNIPC}. Use another "
            "schedule (`static_sigmas`, `dynamic_sigmas`)."
        )
    for key, expected in _UNIPC_FLOW.items() if scheduler == _UNIPC else ():
        if config.get(key) != expected:
            raise ValueError(
                f"scheduler config: got {key} = {config.get(key)!r}, expected {expected!r}: {_UNIPC} is honoured for "
                "flows alone."
            )
    for key, value in config.items():
        is_refused = key in _REFUSED or (key.startswith("use_") and key not in _HONOURED_USES[scheduler])
        if is_refused and value:
            raise ValueError(
                f"scheduler config: {key} = {value!r} is not honoured. Use another schedule, or unset it if "
                "the model can do without."
            )


def _number(config: Mapping[str, object], key: str, default: float) -> float:
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"scheduler config: {key}: got {value!r}, expected a number.")
    return float(value)


def _check_num_steps(num_steps: int) -> None:
    if num_steps < 1:
        raise ValueError(f"schedule: num_steps: got {num_steps}, expected at least 1.")


def _terminated(grid: Grid) -> Tensor:
    return torch.tensor(np.append(grid, 0.0), dtype=torch.float32)
