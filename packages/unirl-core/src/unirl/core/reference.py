"""What a part compares itself with: the pipeline a model comes from, the formula an algorithm comes from.

Conformance runs both sides and compares them. The reference side shares no code with the part's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .array import Array

if TYPE_CHECKING:
    from .config import LatentSamplingConfig, PartConfig

__all__ = ["LossInNumpy", "LossInputs", "ReferenceRun", "RunReference"]


@dataclass(frozen=True, kw_only=True)
class ReferenceRun:
    """What the reference pipeline did with some prompts, deterministically (Euler, no step noise)."""

    sigmas: Array
    """[T+1] of its scheduler, ending in 0."""
    final: Array
    """[N, ...] its final latents, in the layout of the model's `latent_shape`."""


class RunReference(Protocol):
    """Runs the pipeline named by a model's `reference` from a checkpoint folder, without any code of the model."""

    def __call__(
        self, folder: Path, *, prompts: Sequence[str], sampling: LatentSamplingConfig, initial: Array
    ) -> ReferenceRun:
        """initial: [N, ...] latents to start from.  sampling: steps, size and guidance are honoured."""
        ...


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """The numbers that a loss over SDE steps is made of: fp64 NumPy arrays of n samples with S steps each."""

    log_probs: Any
    """[n, S] under the weights that train."""
    old_log_probs: Any
    """[n, S] that the ratio compares with."""
    means: Any
    """[n, S, ...] of the transitions under the weights that train."""
    old_means: Any
    """[n, S, ...] of the transitions under the old policy."""
    reference_means: Any
    """[n, S, ...] of the transitions under the reference policy."""
    std: Any
    """[n, S] standard deviations of the transitions."""
    g: Any
    """[n, S] diffusion coefficients."""
    sigmas: Any
    """[T+1] noise levels."""
    sde_steps: Any
    """[n, S] int64 index of each step into `sigmas`; -1 is none."""
    advantages: Any
    """[n]."""
    weights: Any
    """[n] weights of the samples; 0 counts nowhere."""
    progress: float
    """0 to 1 over the run."""


class LossInNumpy(Protocol):
    """An algorithm's loss over one update, every term with its scale, written from the paper's formula in NumPy."""

    def __call__(self, config: PartConfig, inputs: LossInputs) -> float: ...
