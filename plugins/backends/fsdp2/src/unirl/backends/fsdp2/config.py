"""The settings of the FSDP2 backend, and what is wrong with a set of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from unirl.core.config import BackendConfig

__all__ = ["AverageConfig", "CriticConfig", "Fsdp2Config", "LoraSettings", "MeshConfig", "problems"]

TRAINS = ("lora", "full")
PRECISIONS = ("none", "bf16", "fp16")
SHARDS = ("auto", "always")
SCHEDULES = ("constant", "linear", "cosine")
AVERAGES = ("none", "constant", "linear", "warmup", "adaptive")
MOVES = ("step", "rollout")
INITS = ("gaussian", "kaiming")


@dataclass
class LoraSettings:
    rank: int = 16
    """Rows of A and columns of B: the rank of what is added to each adapted layer."""
    alpha: float = 32.0
    """The adapter's output is multiplied by alpha / rank."""
    targets: list[str] = field(default_factory=lambda: list[str]())
    """Endings of the names of the linear layers to adapt; empty takes the model's own list."""
    init: str = "gaussian"
    """`gaussian` or `kaiming` for A; B starts at 0 either way, so that training starts at the base model."""


@dataclass
class AverageConfig:
    """A slow copy of what trains: copy = d copy + (1 - d) live at each move. t counts the moves made before."""

    kind: str = "none"
    """`none`; `constant`: d = decay; `linear`: d = min(t rate, decay); `warmup`: d = 0 for `flat_moves` moves, then
    min((t - flat_moves) rate, decay); `adaptive`: d = min((1 + t) / (10 + t), decay). d = 0 copies."""
    decay: float = 0.999
    """Share of the copy that a move keeps, in [0, 1]; the bound of it where `kind` lets it rise."""
    rate: float = 0.001
    """What d rises by at each move, for `linear` and `warmup`."""
    flat_moves: int = 0
    """Moves at the start that copy the live weights, for `warmup`."""
    every: str = "step"
    """It moves after every optimizer `step`, or at the end of every `rollout`'s updates."""


@dataclass
class MeshConfig:
    """How the ranks are laid out: replicas x shards x tensor slices."""

    shard: int = 0
    """Ranks that share one copy of the weights; 0 is all of them (FSDP). Fewer keeps a copy in each group of this size
    (HSDP): gradients then travel within a group first, which suits several machines."""
    tensor: int = 1
    """Ranks that split the linear layers of the model's `tensor_parallel` plan. They hold the same rows."""


@dataclass
class CriticConfig:
    """A critic, for algorithms that need one: a copy of the model without its output projection, with one number in its
    place. All of it trains, also where LoRA adapts the policy; `betas`, `eps`, `weight_decay` and `lr_schedule` are
    the policy's."""

    lr: float | None = None
    """Its learning rate, above 0; null keeps no critic."""
    max_grad_norm: float | None = 1.0
    """Its gradient is scaled down to this norm; null never is."""
    lr_warmup_steps: int = 0
    """Its optimizer steps over which its rate rises linearly."""
    warmup_steps: int = 0
    """Its optimizer steps before the policy trains: a round that begins earlier trains the critic alone."""


@dataclass
class Fsdp2Config(BackendConfig):
    lora: LoraSettings = field(default_factory=LoraSettings)
    """The adapters, when `trains` is `lora`."""
    lr_schedule: str = "constant"
    """`constant`, or `linear` or `cosine` down to `lr_min_ratio` at the last step of the run."""
    lr_warmup_steps: int = 0
    """Optimizer steps over which the rate rises linearly to `lr`, with any schedule."""
    lr_min_ratio: float = 0.0
    """Learning rate at the last step over `lr`, in [0, 1], for `linear` and `cosine`."""
    ema: AverageConfig = field(default_factory=AverageConfig)
    """The policy `ema`."""
    lagged: AverageConfig = field(default_factory=lambda: AverageConfig(every="rollout"))
    """The policy `lagged`, for rollouts and losses that want an older one."""
    reference_copy: bool = False
    """Keep a copy of the initial weights as the policy `reference`. LoRA needs none: it switches the adapter off."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The critic, where an algorithm needs one."""
    mixed_precision: str = "none"
    """`bf16` or `fp16` computes in it, with fp32 masters and fp32 gradient sums. fp16 scales the loss."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass instead of keeping its activations."""
    shard: str = "auto"
    """`auto` leaves the module unwrapped on one rank without mixed precision, where wrapping gives the same gradients
    and costs some 10 ms a step; `always` wraps."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """How the ranks are laid out."""
    defer_gradient_sync: bool = True
    """Join gradients over the ranks once per update instead of per micro-batch. Less traffic; the gradients of what
    trains are then held whole on each rank."""


def problems(config: Fsdp2Config) -> Iterator[str]:
    """What is wrong with these settings, each one sentence with the key path first."""
    for key, value, allowed in (
        ("trains", config.trains, TRAINS),
        ("lora.init", config.lora.init, INITS),
        ("lr_schedule", config.lr_schedule, SCHEDULES),
        ("ema.kind", config.ema.kind, AVERAGES),
        ("ema.every", config.ema.every, MOVES),
        ("lagged.kind", config.lagged.kind, AVERAGES),
        ("lagged.every", config.lagged.every, MOVES),
        ("mixed_precision", config.mixed_precision, PRECISIONS),
        ("shard", config.shard, SHARDS),
    ):
        if value not in allowed:
            yield f"backend.{key}: {value!r} was asked for; it is one of {', '.join(allowed)}."
    for key, number, least in (
        ("lora.rank", config.lora.rank, 1),
        ("lr_warmup_steps", config.lr_warmup_steps, 0),
        ("critic.lr_warmup_steps", config.critic.lr_warmup_steps, 0),
        ("critic.warmup_steps", config.critic.warmup_steps, 0),
        ("mesh.shard", config.mesh.shard, 0),
        ("mesh.tensor", config.mesh.tensor, 1),
        ("ema.flat_moves", config.ema.flat_moves, 0),
        ("lagged.flat_moves", config.lagged.flat_moves, 0),
        ("weight_decay", config.weight_decay, 0.0),
        ("ema.rate", config.ema.rate, 0.0),
        ("lagged.rate", config.lagged.rate, 0.0),
    ):
        if not (math.isfinite(number) and number >= least):
            yield f"backend.{key}: {number} was asked for; it must be {least} or more."
    above_zero = [("lr", config.lr), ("eps", config.eps), ("lora.alpha", config.lora.alpha)]
    if config.critic.lr is not None:
        above_zero.append(("critic.lr", config.critic.lr))
    for key, number in above_zero:
        if not (math.isfinite(number) and number > 0):
            yield f"backend.{key}: {number} was asked for; it must be a number above 0."
    for key, bound in (("max_grad_norm", config.max_grad_norm), ("critic.max_grad_norm", config.critic.max_grad_norm)):
        if bound is not None and not bound > 0:
            yield f"backend.{key}: {bound} was asked for; it must be above 0, or null."
    if len(config.betas) != 2 or not all(0 <= beta < 1 for beta in config.betas):
        yield f"backend.betas: {list(config.betas)} was asked for; it takes two numbers in [0, 1)."
    for key, ratio in (
        ("lr_min_ratio", config.lr_min_ratio),
        ("ema.decay", config.ema.decay),
        ("lagged.decay", config.lagged.decay),
    ):
        if not 0 <= ratio <= 1:
            yield f"backend.{key}: {ratio} was asked for; it must lie in [0, 1]."
    if config.trains == "lora" and config.reference_copy:
        yield "backend.reference_copy: LoRA gives the reference by switching the adapter off; leave the copy out."
