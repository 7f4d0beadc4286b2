"""Sizes of checkpoints, predicted."""

from __future__ import annotations

import math
from dataclasses import dataclass

from unirl.core.specs.memory import TrainingMemory

__all__ = ["FP32", "SavedState"]

FP32 = 4
SAVED_TENSOR = 1850
"""Bytes of a tensor in a checkpoint besides its elements: headers of torch's format, and its place in the metadata."""


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """Saved state of a model: trained weights, their averages, optimizer moments, and its critic or fake score.

    The reference policy is that of the base and is not saved.
    """

    memory: TrainingMemory
    elements: int
    """Parameters that train."""
    tensors: int
    """Tensors that train."""
    auxiliary: int
    """Parameters of a critic or a fake score; 0 without one."""
    auxiliary_tensors: int
    shards: int
    """Ranks that each tensor is split over."""

    @property
    def staged_bytes(self) -> float:
        """Bytes that `run.save_async` copies in each train process."""
        return (self._policy_bytes + self._auxiliary_bytes) / self.shards

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint of all ranks: the staged tensors, and a step count and headers for each."""
        tensors, others = self.tensors, self.auxiliary_tensors if self.auxiliary else 0
        # The shards of a tensor are saved one by one; a step count is not sharded.
        saved = tensors * ((self._copies + 2) * self.shards + 1) + others * (3 * self.shards + 1)
        elements = math.ceil(self._policy_bytes) + math.ceil(self._auxiliary_bytes)
        return elements + FP32 * (tensors + others) + SAVED_TENSOR * saved

    @property
    def _copies(self) -> int:
        return 1 + len([name for name in self.memory.copies if name != "reference"])

    @property
    def _policy_bytes(self) -> float:
        return self.elements * (FP32 * self._copies + self.memory.optimizer_bytes)

    @property
    def _auxiliary_bytes(self) -> float:
        return self.auxiliary * (FP32 + self.memory.optimizer_bytes)
