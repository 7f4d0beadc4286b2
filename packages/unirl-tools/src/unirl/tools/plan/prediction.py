"""The prediction for a plan: bytes of each process, operations of each phase, and what does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .model_size import ModelSize

__all__ = ["MemoryPlan", "Process", "StepTime", "shown_bytes"]


@dataclass(frozen=True, kw_only=True)
class Process:
    """One kind of process, and what each of them holds at its fullest."""

    role: str
    """`train`, `rollout`, `reference` or `reward`."""
    count: int
    items: Mapping[str, int]
    """Name of an item -> bytes; each tensor is counted in one item."""
    estimates: Mapping[str, int] = field(default_factory=lambda: dict[str, int]())
    """Bytes on an accelerator besides the tensors of the run: contexts, NCCL, the allocator's reserve."""
    shares_device: bool = False
    """Whether it is on the device of a train rank. It gives its memory back, or is counted there as well."""
    engine_share: float = 0.0
    """Share of a device that an external engine on it takes for its weights and caches, whatever these are; 0 where
    it takes what they are."""

    @property
    def total(self) -> int:
        return sum(self.items.values()) + sum(self.estimates.values())

    def on_device(self, device_bytes: int) -> int:
        """`total` on a device of this size."""
        held = sum(size for name, size in self.items.items() if name.startswith("engine"))
        return self.total + max(0, round(self.engine_share * device_bytes) - held if self.engine_share else 0)


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Work of a step, by phase: floating-point operations over all processes, or bytes that each device gets."""

    generate: int
    old_log_probs: int
    reference: int
    train: int

    @property
    def total(self) -> int:
        return self.generate + self.old_log_probs + self.reference + self.train


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The prediction for a plan."""

    size: ModelSize
    processes: tuple[Process, ...]
    samples: int
    """Samples of a step."""
    sync_bytes: int
    """Bytes of an update of the weights, sent before every rollout where other processes generate; 0 where none is."""
    checkpoint_bytes: int
    """Bytes of a checkpoint."""
    num_checkpoints: int
    """The most that are on disk at one time: those that `run.keep` keeps, and the one that is being written."""
    flops: StepTime
    decode_bytes: int
    """Bytes that a device reads to generate the completions of a step; 0 for latents."""
    pinned_bytes: int
    """CPU memory that each train process pins for frozen weights of blocks."""
    bus_bytes: StepTime | None
    """Bytes of those that are copied to each train device in a step; None where none are."""
    notes: tuple[str, ...]
    """Notes on memory that is not counted."""

    @property
    def device_flops(self) -> dict[str, float]:
        """Operations of each device in a step, by phase."""
        devices = {"generate": 0, "train": 0}
        for process in self.processes:
            if not process.shares_device and process.role != "reward":
                devices["generate" if process.role == "rollout" else "train"] += process.count
        return {
            phase: flops / (devices["generate" if phase == "generate" else "train"] or devices["train"])
            for phase, flops in vars(self.flops).items()
        }

    @property
    def phase_flops(self) -> dict[str, float]:
        """Operations of each device in the phases `generate` and `train` of a step. Old log-probs and the reference
        policy are part of training."""
        flops = self.device_flops
        return {"generate": flops["generate"], "train": sum(flops.values()) - flops["generate"]}

    def overfull(self, device_bytes: int) -> list[str]:
        """A sentence for each kind of process that needs more than a device has."""
        return [
            f"{process.role}: needs {process.on_device(device_bytes) / 2**30:.1f} GiB of each device, expected at most "
            f"{device_bytes / 2**30:.1f} GiB. Largest: "
            + ", ".join(f"{name} {size / 2**30:.1f} GiB" for name, size in _largest(process, device_bytes)[:3])
            + f". {_hint(process)}"
            for process in self.processes
            if process.on_device(device_bytes) > device_bytes
        ]


def shown_bytes(size: int) -> str:
    """A number of bytes for people, such as `1.5 GiB`."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} B"


def _hint(process: Process) -> str:
    if process.role == "reward":
        return "Use the reward's `dtype`, fewer rewards in a process (launcher.dedicated_rewards), or more GPUs for it."
    ways = ["Use more ranks", "a smaller train.micro_batch_size", "backend.activation_checkpointing=true"]
    if any(name.startswith("reward.") for name in process.items):
        ways.append("launcher.reward_gpus for rewards on GPUs of their own")
    return f"{', '.join(ways)} or backend.trains=lora."


def _largest(process: Process, device_bytes: int) -> list[tuple[str, int]]:
    items = {**process.items, **process.estimates}
    if process.engine_share:
        items = {name: size for name, size in items.items() if not name.startswith("engine")}
        items["engine"] = round(process.engine_share * device_bytes)
    return sorted(items.items(), key=lambda item: -item[1])
