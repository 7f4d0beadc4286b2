"""The training processes, in VeOmni's device mesh."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from unirl.core.errors import RecipeError
from unirl.train_host.ranks import Ranks

from .config import MeshConfig
from .library import veomni

__all__ = ["VeomniRanks"]


class VeomniRanks(Ranks):
    """The default process group as replicas x shards, in VeOmni's `ParallelState`; this process alone without one.

    Neighbouring ranks share the experts, or the tokens of a sample: rank = replica x shards + shard.
    """

    def __init__(self, device: torch.device, mesh: MeshConfig) -> None:
        super().__init__(device, needs_group=False, shard=mesh.shard, sequence=mesh.sequence)
        states = veomni("distributed.parallel_state")
        world = self.num_ranks * mesh.sequence
        num_shards = mesh.shard or world
        # The experts are those of one copy of the weights.
        self._divided(num_shards, mesh.expert, "expert", "ranks of one copy")
        rows = self._divided(num_shards, mesh.sequence, "sequence", "ranks of one copy")
        self.num_experts = mesh.expert
        """Ranks that share the experts."""
        own = veomni("utils.device").get_device_type()
        if world > 1 and own != device.type:
            raise RecipeError(
                f"model.device: got {device.type}, but VeOmni trains on {own} wherever there is one. Put the model on "
                f"{own}, or hide the devices."
            )
        self._use = states.use_parallel_state
        self.state: Any = states.ParallelState() if world == 1 else None
        if world > 1:
            # What an earlier process group left behind is of no use, and would be found by its sizes.
            states.clear_parallel_state()
            self.state = states.init_parallel_state(
                dp_size=self.num_ranks,
                dp_replicate_size=world // num_shards,
                dp_shard_size=rows,
                ulysses_size=mesh.sequence,
                extra_parallel_sizes=(mesh.expert,),
                extra_parallel_placement_innermost=(False,),
                extra_parallel_names=("ep",),
                device_type=device.type,
                name=None,
            )
        if self.num_experts > 1:
            assert self.expert_mesh is not None
            # So that a norm over all shards of all experts is one reduction.
            self.expert_mesh["ep_fsdp", "ep"]._flatten("experts")

    @property
    def shard_mesh(self) -> DeviceMesh:
        with quiet():
            return self.state.fsdp_mesh

    @property
    def sequence_mesh(self) -> DeviceMesh:
        return self.state.device_mesh["ulysses"]

    @property
    def expert_mesh(self) -> DeviceMesh | None:
        """[replicate,] shard, expert: of the weights of experts, where these are split."""
        return self.state.extra_parallel_fsdp_device_mesh["ep"]

    @property
    def num_expert_shards(self) -> int:
        """Ranks that each expert is sharded over, in one copy of the weights."""
        return 1 if self.expert_mesh is None else self.expert_mesh.size(-2)

    @contextmanager
    def as_current(self) -> Generator[None]:
        """Within the block VeOmni's functions find this mesh; a process may have several backends."""
        with self._use(self.state), quiet():
            yield


@contextmanager
def quiet() -> Generator[None]:
    """Within the block torch does not warn of how VeOmni slices its mesh."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Slicing a flattened dim", category=UserWarning)
        yield
