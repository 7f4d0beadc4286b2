"""One rank that trains while its snapshot is written: `python fsdp2_snapshot_ranks.py RANK STORE FOLDER RANKS`. Leaves
the checkpoints of the same moment in FOLDER: `sync`, and `async`, written later; and `rank-RANK.pt`."""

import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from fsdp2_toy import Clipped, ToyModel, make_backend, make_track
from slow_disk import slow_disk
from unirl.backends.fsdp2.config import AverageConfig, LoraSettings
from unirl.core.roles import Job
from unirl.core.specs.config import TrainConfig

CASES = {
    # Rank 3 does not divide by two: the ranks hold shards of different size.
    "lora": {"lora": LoraSettings(rank=3, alpha=6.0)},
    "full": {"trains": "full", "reference_copy": True},
}


def run(backend, track, steps):
    for _ in range(steps):
        backend.train([Job(track=track, algorithm=Clipped())], progress=0.0)


def snapshot_while_training(case, folder, track):
    """The weights of two steps more, trained while the disk is held, and whether the memory was used again."""
    backend, _ = make_backend(
        train=TrainConfig(micro_batch_size=2), ema=AverageConfig(kind="constant", decay=0.5), **CASES[case]
    )
    run(backend, track, 1)
    backend.save(folder / "sync")
    write = backend.snapshot()
    memory = backend._staging._memory.data_ptr()
    with slow_disk() as disk:
        disk.hold()
        writer = threading.Thread(target=write, args=(folder / "async",))
        writer.start()
        disk.wait_until_reached()
        # Collective calls of both threads are on their way at the same time.
        run(backend, track, 2)
        weights = dict(backend.export_weights(kind="merged").tensors)
        disk.release()
        writer.join()
    backend.snapshot()(folder / "next")
    used_again = backend._staging._memory.data_ptr() == memory
    backend.close()
    return weights, used_again


def main():
    rank, store, folder, ranks = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    track = make_track(ToyModel()).select(range(rank, 8, ranks))
    result = {}
    for case in CASES:
        (folder / case).mkdir(exist_ok=True)
        result[case] = snapshot_while_training(case, folder / case, track)
    torch.save(result, folder / f"rank-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
