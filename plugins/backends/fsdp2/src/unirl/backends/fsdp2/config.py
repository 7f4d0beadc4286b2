"""The settings of the FSDP2 backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from unirl.core.acceleration import Acceleration
from unirl.core.limits import Reason, limit, one_of
from unirl.core.specs.memory import TrainingMemory
from unirl.train_host.config import ShardedConfig, mesh_problems, needs_torchao
from unirl.train_host.sections import AverageConfig, CriticConfig, FakeScoreConfig, LoraSettings

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["AverageConfig", "CriticConfig", "FakeScoreConfig", "Fsdp2Config", "LoraSettings", "MeshConfig"]


@dataclass
class MeshConfig:
    """Device mesh: replicas x shards x tensor-parallel ranks. Neighbouring shards may share a sequence."""

    shard: int = limit(0, least=0)
    """Ranks that one copy of the weights is sharded over; 0 is all of them (FSDP). Fewer gives each group of this size
    its own copy (HSDP): gradients are reduced within a group first, which suits several machines. 1 with LoRA: every
    rank has the whole base and gathers nothing; the fastest where it fits."""
    tensor: int = limit(1, least=1)
    """Tensor-parallel ranks: they split the linear layers of the model's `tensor_parallel` plan and get the same
    samples."""
    sequence: int = limit(1, least=1)
    """Sequence-parallel ranks (Ulysses): they share the tokens of every sample and exchange attention heads. They get
    the same samples, and the weights are sharded over them as over all. For models with `splits_sequence`."""


@dataclass
class Fsdp2Config(ShardedConfig):
    shard: str = one_of("auto", "always", default="auto")
    """`always` wraps the module. `auto` does not on one rank where the module computes in its own dtype: without mixed
    precision, and with LoRA where `model.dtype` is that of mixed precision. FSDP would copy every weight in every
    forward there, for the same gradients."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Device mesh."""
    reshard_after_forward: str = one_of("auto", "always", "never", default="auto")
    """`always`: give back what a forward has gathered of other ranks' shards, and gather it again in the backward pass.
    `never`: keep it until then, and through the forwards of a rollout in process, which gather once in place of once a
    step. `auto`: keep it on a GPU where the whole model takes at most a sixteenth of the memory. The numbers are the
    same."""
    optimizer: str = one_of("adamw", "adamw_8bit", default="adamw")
    """`adamw`: torch's, 8 bytes of state for each trained parameter. `adamw_8bit`: torchao's, 2 bytes. A critic has the
    first, a fake score the same as the policy."""

    rounding_only = (*ShardedConfig.rounding_only, "reshard_after_forward")
    accelerations: ClassVar[Mapping[str, Acceleration]] = {
        # Half of the widest step between codes, of the largest moment of 256.
        "optimizer": Acceleration(scope="training", error={"adamw_8bit": 2.0**-7})
    }

    @property
    def copies(self) -> int:
        """See `BackendConfig`."""
        return self.mesh.tensor * self.mesh.sequence

    @property
    def replicates(self) -> bool:
        """See `ShardedConfig`. The updater averages what little the adapters have of gradients."""
        return self.trains == "lora" and self.critic.lr is None and self.mesh.shard == 1 and self.copies == 1

    def memory(self, plan: Plan | None) -> TrainingMemory | None:
        """See `BackendConfig`. None with tensor parallelism, whose split depends on the model's plan."""
        if self.mesh.tensor > 1:
            return None
        # Two moments, each with an fp32 scale for 256 elements.
        state = 8.0 if self.optimizer == "adamw" else 2 * (1 + 4 / 256)
        memory = self.kept(shard=self.mesh.shard, sequence=self.mesh.sequence, optimizer_bytes=state)
        keeps: dict[str, Literal["always", "never", "auto"]] = {"always": "never", "never": "always", "auto": "auto"}
        return replace(memory, keeps_gathered=keeps[self.reshard_after_forward])

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Those of every backend, and a mesh that the model cannot be laid out on."""
        yield from super().problems(plan, stage)
        if self.optimizer == "adamw_8bit":
            yield from needs_torchao(".optimizer", f"got {self.optimizer}")
        if self.compile != "none" and self.copies > 1:
            axis = "tensor" if self.mesh.tensor > 1 else "sequence"
            yield Reason(
                key=".compile",
                text=f"got {self.compile} with mesh.{axis}={self.copies}, whose exchanges inside of blocks are not "
                "compiled. Use none, or a mesh of shards alone.",
            )
        if self.quantize != "none" and self.shard == "always":
            text = f"got {self.quantize} with shard=always, which wraps the module, and quantized weights cannot be "
            yield Reason(key=".quantize", text=text + "sharded. Use shard=auto.")
        if self.offload_frozen != "none" and self.shard == "always":
            text = f"got {self.offload_frozen} with shard=always, which gathers weights from shards on the device. "
            yield Reason(key=".offload_frozen", text=text + "Use shard=auto.")
        if plan is None or stage is None:
            return
        yield from mesh_problems(self.mesh, plan, stage)
        model = stage.model
        if self.mesh.tensor > 1 and not model.spec.tensor_parallel:
            yield Reason(key=".mesh.tensor", text=f"model {model.name!r} has no tensor-parallel plan; use 1.")
        if self.mesh.sequence > 1 and self.mesh.tensor > 1:
            yield Reason(
                key=".mesh.sequence",
                text=f"got {self.mesh.sequence} with mesh.tensor={self.mesh.tensor}; one of them must be 1.",
            )
