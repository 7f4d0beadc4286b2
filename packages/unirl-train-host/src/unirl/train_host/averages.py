"""Copies of the trainable weights: frozen ones and moving averages, swapped in place."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .config import ShardedConfig
from .sections import AverageConfig
from .sharding import local

__all__ = ["Average", "WeightCopy", "decay_at", "make_copies"]


class WeightCopy:
    """A copy of the weights, shard by shard; nothing is gathered."""

    def __init__(self, live: Mapping[str, Tensor]) -> None:
        self._live = live
        self.values = {name: value.detach().clone() for name, value in live.items()}

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the copy with the live weights. Done twice, both are as before, bit for bit.

        Through `.data`, which leaves version counters alone: a graph that was built before the first swap is valid
        again after the second.
        """
        for name, value in self.values.items():
            live, mine = local(self._live[name]).data, local(value)
            kept = live.clone()
            live.copy_(mine)
            mine.copy_(kept)

    def to(self, device: torch.device) -> None:
        self.values = {name: value.to(device) for name, value in self.values.items()}


class Average(WeightCopy):
    """An exponential moving average of the weights."""

    def __init__(self, live: Mapping[str, Tensor], config: AverageConfig) -> None:
        super().__init__(live)
        self.config = config
        self.num_turns = 0
        """Steps or rollouts, as `config.every` says, that have been."""

    @property
    def num_moves(self) -> int:
        """Its updates so far."""
        return self.num_turns // self.config.period

    @torch.no_grad()
    def move(self) -> None:
        """After a step or a rollout: where it is due, an update towards the live weights, copy = d copy + (1 - d)
        live."""
        decay = decay_at(self.config, self.num_moves)
        self.num_turns += 1
        if self.num_turns % self.config.period:
            return
        for name, value in self.values.items():
            mine, live = local(value), local(self._live[name])
            if decay <= 0:
                mine.copy_(live)
            else:
                mine.mul_(decay).add_(live, alpha=1.0 - decay)


def make_copies(live: Mapping[str, Tensor], config: ShardedConfig) -> dict[str, WeightCopy]:
    """Policy -> its copy of the weights, for those that the settings keep."""
    copies: dict[str, WeightCopy] = {}
    averages = (("ema", config.ema), ("lagged", config.lagged), ("reference", config.moving_reference))
    for name, average in averages:
        if average.kind != "none":
            copies[name] = Average(live, average)
    if config.reference_copy:
        copies["reference"] = WeightCopy(live)
    if config.fake_score.lr is not None:
        copies["fake"] = WeightCopy(live)
    return copies


def decay_at(config: AverageConfig, moves: int) -> float:
    """The decay d after `moves` earlier updates. The formulas are at `AverageConfig.kind`."""
    if config.kind == "constant":
        return config.decay
    if config.kind == "linear":
        return min(moves * config.rate, config.decay)
    if config.kind == "warmup":
        return min(max(0, moves - config.flat_moves) * config.rate, config.decay)
    assert config.kind == "adaptive", config.kind
    return min((1 + moves) / (10 + moves), config.decay)
