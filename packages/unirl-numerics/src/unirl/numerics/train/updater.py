"""The backend's side of the train stack: the optimizers of the policy, and of a critic or fake score beside it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor
    from unirl.core.types.track import Track

__all__ = ["AuxiliaryUpdater", "CriticUpdater", "FakeScoreUpdater", "StepReport", "Updater"]


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Result of one optimizer step."""

    grad_norm: float
    """Global gradient norm over all ranks, before clipping."""
    grad_rms: float
    """Root mean square of the gradient elements after clipping."""
    skipped: bool = False
    """A gradient was not finite, so the weights were left unchanged."""
    metrics: Mapping[str, float] = field(default_factory=lambda: dict[str, float]())
    """Further metrics of this step, averaged over the updates."""


class Updater(Protocol):
    """A backend as the stack uses it. Every method is called equally often, in the same order, on every rank."""

    @property
    def device(self) -> Any:
        """Device of the micro-batches."""
        ...

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks: those with different samples."""
        ...

    @property
    def gradient_reduction(self) -> Literal["mean", "sum"]:
        """How gradients are reduced over the ranks. FSDP and DDP average, so the loss is multiplied by their number."""
        ...

    def zero_grad(self) -> None: ...
    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of `loss`. `last` is the last micro-batch of an update: gradients are then complete."""
        ...

    def step(self) -> StepReport: ...
    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """values: fp64 on the CPU. Returns their sum over the ranks, fp64 on the CPU."""
        ...

    def all_reduce_max(self, values: Tensor) -> Tensor:
        """values: fp64 on the CPU. Returns their maximum over the ranks, fp64 on the CPU."""
        ...


class AuxiliaryUpdater(Protocol):
    """A critic or a fake score, as the stack uses it beside `Updater`. Called equally often on every rank."""

    @property
    def is_alone(self) -> bool:
        """Its warm-up: the policy takes no step in this call of `train_on`."""
        ...

    @property
    def steps_per_update(self) -> int:
        """Steps that it takes beside each update of the policy, all on the same samples."""
        ...

    def zero_grad(self) -> None: ...
    def backward(self, loss: Tensor, *, last: bool) -> None:
        """As `Updater.backward`, for its own weights."""
        ...

    def step(self) -> StepReport: ...


class CriticUpdater(AuxiliaryUpdater, Protocol):
    """The critic of a backend."""

    def values(self, track: Track) -> Tensor:
        """[n, S] fp32 before each action of these rows, with gradient unless in no_grad; see `replay_values` for tokens
        and `track_replay.replay_step_values` for denoise steps."""
        ...


class FakeScoreUpdater(AuxiliaryUpdater, Protocol):
    """The fake score of a backend."""

    def in_use(self) -> AbstractContextManager[None]:
        """Within the block the module has its weights: those that `backward` and `step` change."""
        ...
