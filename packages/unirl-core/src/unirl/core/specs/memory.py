"""Facts that `unirl plan` predicts memory from: the memory of a backend, and the processes that a launcher starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["GATHERED_SHARE", "Processes", "RewardProcesses", "TrainingMemory", "quantized_bytes"]

GATHERED_SHARE = 1 / 16
"""Share of a device's memory that gathered weights may take to stay gathered, where a backend decides."""


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Memory of the trainable parameters in a backend, with its settings. Those parameters are in fp32."""

    lora_rank: int = 0
    """Rank of the adapters; 0 trains the parameters themselves."""
    lora_targets: tuple[str, ...] = ()
    """Layers with adapters, by the end of their names; empty takes the model's list."""
    copies: tuple[str, ...] = ()
    """Policies that it keeps a copy of the trained parameters for: `reference`, `ema`, `lagged`, `moving reference`.
    Averages are saved in checkpoints; the reference, which never changes, is not."""
    optimizer_bytes: float = 8
    """Optimizer state of a trained parameter, in bytes on average: 8 are the two moments of Adam."""
    auxiliary: Literal["", "critic", "fake score"] = ""
    """Network that it also trains, with a separate optimizer: a critic, which copies all of the model's parameters, or
    a fake score, which copies the trained ones."""
    auxiliary_steps: int = 0
    """Optimizer steps of the critic or the fake score per update of the policy."""
    lr_scales: Mapping[str, float] = field(default_factory=lambda: dict[str, float]())
    """Factors of the learning rate by regular expressions on names of parameters; 0 freezes them."""
    shard_ranks: int = 0
    """Ranks that a copy of the weights is sharded over; 0 is all of them."""
    row_ranks: int = 1
    """Ranks that hold the same rows."""
    sequence_ranks: int = 1
    """Ranks among `row_ranks` that share the tokens of a row."""
    compute_dtype: str = ""
    """Dtype that gathered weights are cast to, such as `bfloat16`; empty leaves them."""
    whole_gradients: bool = False
    """Every rank holds the gradients of all trained parameters until the end of an update."""
    keeps_gathered: Literal["always", "never", "auto"] = "never"
    """Whether the blocks that a forward has gathered stay so until the backward pass; `auto` where they all take at
    most `GATHERED_SHARE` of the device."""
    recomputes_blocks: bool = False
    """A backward pass computes the activations of each block again."""
    quantized: str = ""
    """Kind of the frozen weights of linear layers in blocks, `int8` or `nf4`; empty leaves them in their dtype."""
    offloads_blocks: bool = False
    """Frozen weights of blocks are in CPU memory, and on the device those of two blocks."""


def quantized_bytes(rows: int, columns: int, *, kind: str, itemsize: int) -> int:
    """Bytes of a quantized weight as torchao stores it. itemsize: bytes of an element of its dtype.

    `int8`: a byte each, and for each row a scale in fp32 and a zero point in int8.  `nf4` (QLoRA, arXiv 2305.14314):
    half a byte each, for each block of 64 a scale in int8, for each 256 of these a factor; their mean, and 16 levels.
    """
    elements = rows * columns
    if kind == "int8":
        return elements + 5 * rows
    blocks = elements // 64
    return elements // 2 + blocks + itemsize * (blocks // math.gcd(blocks, 256) + 17)


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Number of processes by role, as a launcher's settings give it."""

    train: int = 1
    rollout: int = 0
    """0: train ranks generate."""
    reference: int = 0
    """0: train ranks compute the log-probs of the reference policy."""
    is_colocated: bool = False
    """Each rollout worker shares the device of a train rank."""
    bucket_bytes: int = 0
    """Size of a weight-transfer bucket; 0 where no weights are sent."""
    receives_on_device: bool = False
    """Rollout workers whose engines share their weights collect an update on their devices; else, and for external
    engines, in the memory of their machines."""


@dataclass(frozen=True, kw_only=True)
class RewardProcesses:
    """Processes that build the same rewards, and each score a share of the samples."""

    rewards: tuple[str, ...]
    """Rewards that they build, by key."""
    count: int
    """Number of processes."""
    device: Literal["none", "own", "shared"]
    """`none`: they compute on CPUs. `own`: with the `gpus` that are set for them. `shared`: each shares the device of a
    train rank."""
    gpus: float = 0.0
    """GPUs of each process with `own`; fractions share one."""
