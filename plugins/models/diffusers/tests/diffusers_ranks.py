"""One process of a run: one of two ranks (`python diffusers_ranks.py RANK STORE FOLDER`)
with a model built lazily and sharded by FSDP2, or a process alone with an eager one."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from pipeline_inputs import inputs_of, sampling_of
from rank_processes import launch
from tiny_pipelines.small_images import small_images
from torch.distributed.tensor import DTensor
from unirl.core.errors import RecipeError
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.loop.build import build_parts
from unirl.models.diffusers.model import DiffusersModel

RANKS = 2
DEADLINE_S = 560
ROWS = ([0, 1, 0], [1, 1, 1])
"""Prompts of each rank's rows, of two lengths: the ranks need unequally many forwards where rows are split."""
SIGMAS = ([0.9, 0.6, 0.35], [0.6, 0.6, 0.6])


def computed(case: dict[str, Any], *, rank: int | None = None) -> dict[str, Any]:
    """Velocities, loss and whole gradients of rows of noise, and the weights that are exported; of one rank's
    rows, or of all without `rank`. Or the refusal.

    case: name of the family, words of the recipe, and whether the timestep is scaled wrongly.
    """
    catalog = Catalog.discover()
    plan = compose("diffusers/flow-grpo", case["words"], catalog=catalog)
    with ExitStack() as stack:
        stack.enter_context(small_images())
        if case.get("is_wrong"):
            own = DiffusersModel.timestep
            stack.enter_context(patch.object(DiffusersModel, "timestep", lambda self, level: own(self, 0.9 * level)))
        try:
            parts = build_parts(plan, catalog=catalog, rewards="none", lazy=rank is not None)
        except RecipeError as error:
            return {"refusal": str(error)}
        model: Any = parts.only.model
        sampling = sampling_of(case["name"])
        conditions = model.encode(
            inputs_of(case["name"], "a red ring", "two blue squares, and a disc"), sampling=sampling
        )
        ranks = range(RANKS) if rank is None else [rank]
        index = [row for each in ranks for row in ROWS[each]]
        x = torch.randn(
            (RANKS * len(ROWS[0]), *model.latent_shape(sampling)), generator=torch.Generator().manual_seed(2)
        )
        x = x if rank is None else x.chunk(RANKS)[rank]
        velocity = model.velocity(
            x,
            torch.tensor([sigma for each in ranks for sigma in SIGMAS[each]]),
            {name: [value[row] for row in index] for name, value in conditions.items()},
        )
        loss = velocity.square().mean()
        loss.backward()
    module = model.trainable
    grads = {name: param.grad for name, param in module.named_parameters() if param.grad is not None}
    result = {
        "is_sharded": any(isinstance(param, DTensor) for param in module.parameters()),
        "velocity": velocity.detach(),
        "loss": loss.detach(),
        "grads": {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()},
        "export": dict(parts.only.backend.export_weights(kind="merged").tensors.items()),
    }
    parts.only.backend.close()
    return result


def launched(folder: Path, cases: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Results of two ranks for each case. Fails with the output of both when one fails."""
    (folder / "cases.json").write_text(json.dumps(cases))
    launch(Path(__file__), folder / "store", folder, ranks=RANKS, deadline_s=DEADLINE_S)
    found = [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(RANKS)]
    return [list(of_case) for of_case in zip(*found, strict=True)]


def main() -> None:
    rank, store, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    found = [computed(case, rank=rank) for case in json.loads((folder / "cases.json").read_text())]
    torch.save(found, folder / f"rank-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
