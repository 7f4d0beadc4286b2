"""One rank of the test of scale, `python diffusers_scale_ranks.py RANK STORE FOLDER`: what building a model took."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from tensor_meter import Meter
from tiny_pipelines.small_images import small_images
from torch import Tensor, nn
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.loop.build import build_parts
from unirl.models.diffusers.model import DiffusersModel
from unirl.train_host.sharding import local

RANKS = 2


def built(words: list[str], *, lazy: bool) -> dict[str, Any]:
    """Bytes: `filled`, the most until the model is compared with its pipeline; `peak`, the most of the whole build;
    `held`, of the storages of the trained parameters after it; and `others`, all that is whole on every rank. Of an eager
    model, whose comparison is not measured, `peak` is `filled`."""
    catalog = Catalog.discover()
    plan = compose("diffusers/flow-grpo", words, catalog=catalog)
    verify, filled = DiffusersModel.verify, 0
    with Meter() as meter:

        def noted(model: DiffusersModel) -> None:
            nonlocal filled
            meter.note(_all(model))  # what other threads loaded
            filled = meter.peak
            verify(model)

        with patch.object(DiffusersModel, "verify", noted):
            parts = build_parts(plan, catalog=catalog, rewards="none", lazy=lazy)
        model: Any = parts.only.model
        meter.note(_all(model))
        peak = meter.peak if lazy else filled
    params = list(model.trainable.parameters())
    result = {
        "filled": filled,
        "peak": peak,
        "held": _bytes(map(local, params)),
        "others": _bytes(_all(model)) - _bytes(params),
        "rows": {name: len(local(param)) for name, param in model.trainable.named_parameters()},
    }
    parts.only.backend.close()
    return result


def _all(model: Any) -> list[Tensor]:
    parts = [part for part in model.pipeline.components.values() if isinstance(part, nn.Module)]
    return [tensor for part in parts for tensor in (*part.parameters(), *part.buffers())]


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = [local(tensor).untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def main() -> None:
    rank, store, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    cases = json.loads((folder / "cases.json").read_text())
    with small_images():
        found = {name: [built(words, lazy=lazy) for lazy in (True, False)] for name, words in cases.items()}
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
