"""Which steps are stochastic: the part of `match` that is about the range that they are chosen from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import LatentSamplingConfig

__all__ = ["sde_range"]


def sde_range(key: str, sampling: LatentSamplingConfig) -> Iterator[tuple[str, str]]:
    """Why no SDE steps can be chosen with these settings: key path and sentence of each. key: of the settings."""
    sde, steps = sampling.sde, sampling.steps
    modes = ("all", "fraction", "random", "window", "fixed", "none")
    if sde.mode not in modes:
        yield (
            f"{key}.sde.mode",
            f"{sde.mode!r} is not one of {', '.join(modes)}.",
        )
        return
    if not 0 <= sde.first < sde.last <= 1:
        yield (
            f"{key}.sde.first",
            f"the pool goes from {sde.first} to {sde.last} of the steps; it needs 0 <= first < last <= 1.",
        )
        return
    if sde.mode in ("all", "fixed") and (sde.first, sde.last) != (0, 1):
        yield (
            f"{key}.sde.first" if sde.first else f"{key}.sde.last",
            f"mode {sde.mode!r} takes no part of the steps, found {sde.first} to {sde.last}; use mode 'fraction'.",
        )
    pool = int(steps * sde.last + 1e-9) - int(steps * sde.first + 1e-9)
    if sde.mode in ("fraction", "random", "window") and pool < 1:
        yield (
            f"{key}.sde.last",
            f"from {sde.first} to {sde.last} of {steps} steps there is no step; widen the range.",
        )
    if sde.mode == "random" and not 1 <= (sde.count or 0) <= pool:
        yield (
            f"{key}.sde.count",
            f"{sde.count} steps were asked for; the pool has {pool} (from {sde.first} to {sde.last} of {steps}).",
        )
    if sde.mode == "window" and not 1 <= sde.window <= pool:
        yield (
            f"{key}.sde.window",
            f"a window of {sde.window} steps was asked for; the pool has {pool}.",
        )
    if sde.mode == "window" and not 0 <= sde.overlap < sde.window:
        yield (
            f"{key}.sde.overlap",
            f"{sde.overlap} was asked for; it must be 0 or more and less than the window of {sde.window}.",
        )
    if sde.mode == "fixed":
        if not sde.steps:
            yield (
                f"{key}.sde.steps",
                "mode 'fixed' was asked for with no steps; name some, such as [0,1].",
            )
        for step in sde.steps:
            if not 0 <= step < steps:
                yield (
                    f"{key}.sde.steps",
                    f"step {step} is past the last step {steps - 1} ({key}.steps = {steps}). Steps count from 0.",
                )
