"""Runs all cases on 2 and then on 4 gloo ranks: `python veomni_worlds.py FOLDER`. VeOmni is imported once, and its
ranks are forked. Rank 0 of each world leaves its findings in FOLDER."""

import multiprocessing
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import unirl.backends.veomni.backend  # noqa: F401
import veomni_cases
from unirl.backends.veomni.library import veomni
from unirl.core.errors import RecipeError

DEADLINE_S = 280


def refusals(folder, rank):
    """Errors for meshes that a model cannot be laid out on."""

    def said(case, mesh, **changes):
        model = veomni_cases.make_model(case, folder)
        veomni_cases.CASES[2]["refused"] = {**veomni_cases.FULL, "mesh": mesh, **changes}
        with pytest.raises(RecipeError) as refused:
            veomni_cases.make_backend("veomni", "refused", model)
        return str(refused.value)

    return {
        "dense": said("full", {"expert": 2}),
        "uneven": said("full", {"shard": 1, "expert": 2}),
        "ranks": said("full", {"shard": 3}),
    }


def cases_of(rank, world, folder):
    """Results of `run` for every case of a world."""
    found = {}
    for case in veomni_cases.CASES[world]:
        print(case, flush=True)
        # The experts are built without values, and filled when they are split.
        found[case] = veomni_cases.run("veomni", case, folder, rank=rank, world=world, lazy="experts" in case)
    if world == 2:
        found["refusals"] = refusals(folder, rank)
    return found


def rank_of(rank, world, folder, findings):
    log = (folder / f"log-{world}-{rank}").open("w")
    sys.stdout = sys.stderr = log
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=240))
    found = findings(rank, world, folder)
    if rank == 0:
        torch.save(found, folder / f"found-{world}.pt")
    dist.barrier()
    dist.destroy_process_group()


def main(findings, worlds):
    folder = Path(sys.argv[1])
    for module in ("distributed.torch_parallelize", "optim"):
        veomni(module)
    context = multiprocessing.get_context("fork")
    for world in worlds:
        ranks = [context.Process(target=rank_of, args=(rank, world, folder, findings)) for rank in range(world)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join(DEADLINE_S)
        failed = [number for number, one in enumerate(ranks) if one.exitcode]
        for one in ranks:
            one.kill()
        if failed:
            sys.exit("\n".join((folder / f"log-{world}-{number}").read_text()[-3000:] for number in failed))


if __name__ == "__main__":
    main(cases_of, veomni_cases.CASES)
