"""The settings of the VeOmni backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from unirl.core.acceleration import BF16, Acceleration
from unirl.core.limits import Reason, limit, one_of
from unirl.core.match.mismatch_bounds import SIXTEEN_BITS
from unirl.core.specs.memory import TrainingMemory
from unirl.train_host.config import ShardedConfig, mesh_problems

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["MeshConfig", "VeomniConfig"]


@dataclass
class MeshConfig:
    """VeOmni's device mesh: replicas x shards. Experts, and the tokens of a sample, are split over neighbouring shards.

    Tensor, pipeline and context parallelism are not offered: VeOmni 0.1.12 calls torch's `parallelize_module` without a
    plan, so that nothing is split; rejects pipelines itself; and has context parallelism for one architecture alone.
    """

    shard: int = limit(0, least=0)
    """Ranks that one copy of the weights is sharded over; 0 is all of them (FSDP). Fewer gives each group of this size
    its own copy (HSDP)."""
    expert: int = limit(1, least=1)
    """Expert-parallel ranks: they split the experts of every layer, and tokens are sent to the rank of their expert.
    They get different samples. For models whose layers have fused experts, such as Qwen3-MoE."""
    sequence: int = limit(1, least=1)
    """Sequence-parallel ranks (Ulysses): they share the tokens of every sample and exchange attention heads. They get
    the same samples. For models with `splits_sequence`: with an attention that is not split, each rank would attend
    within its part of the tokens alone."""


@dataclass
class VeomniConfig(ShardedConfig):
    optimizer: str = one_of("adamw", "anyprecision_adamw", default="adamw")
    """VeOmni's optimizer: `adamw`, or `anyprecision_adamw` with moments in bf16 and Kahan summation. VeOmni's `muon` is
    not offered: its exchange fails on gloo, so that no test here could run it."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Device mesh."""

    accelerations: ClassVar[Mapping[str, Acceleration]] = {
        "optimizer": Acceleration(scope="training", error={"anyprecision_adamw": BF16})
    }

    @property
    def copies(self) -> int:
        """See `BackendConfig`."""
        return self.mesh.sequence

    def memory(self, plan: Plan | None) -> TrainingMemory | None:
        """See `BackendConfig`. None with split experts, which are not every rank's."""
        # `anyprecision_adamw` has two moments and a compensation in bf16.
        state = 8 if self.optimizer == "adamw" else 6
        split = {"shard": self.mesh.shard, "sequence": self.mesh.sequence}
        return self.kept(**split, optimizer_bytes=state) if self.mesh.expert == 1 else None

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Those of every backend, fp16, and a mesh that the model cannot be laid out on."""
        yield from super().problems(plan, stage)
        if self.mixed_precision == "fp16":
            yield Reason(
                key=".mixed_precision",
                text="got fp16; VeOmni is run with bf16 or none here. Use bf16, or backend=fsdp2.",
            )
        if self.compile != "none":
            yield Reason(key=".compile", text=f"got {self.compile}, expected none with VeOmni. Or use backend=fsdp2.")
        if self.mesh.sequence > 1 and self.mesh.expert > 1:
            yield Reason(
                key=".mesh.sequence",
                text=f"got {self.mesh.sequence} with mesh.expert={self.mesh.expert}; one of them must be 1.",
            )
        if plan is None or stage is None:
            return
        yield from mesh_problems(self.mesh, plan, stage)
        dtype = getattr(stage.model.config, "dtype", None)
        if self.trains == "lora" and self.mixed_precision != "none" and dtype in SIXTEEN_BITS:
            yield Reason(
                key=".mixed_precision",
                text=f"got {self.mixed_precision} with model.dtype={dtype} and LoRA; VeOmni would keep "
                "the frozen weights in float32. Use none: they are computed with in model.dtype.",
            )
