"""The receiving process of the transfer tests: `python transfer_receiver.py CARRIER FOLDER`, spoken to over its pipes.

Reads pickled (method, arguments) from stdin, answers with pickled ("ok", value) or ("error", text) on stdout.
"""

import pickle
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from unirl.runtime.weights.carriers import ByValueCarrier, CollectiveCarrier, DiskCarrier, SharedMemoryCarrier
from unirl.runtime.weights.transfer import Receiver


def group(folder, rank):
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )


def carrier(name, folder, rank):
    """The carrier of one side."""
    if name == "collective":
        group(folder, rank)
        return CollectiveCarrier(None, source=0)
    if name == "by-value":
        return ByValueCarrier()
    return SharedMemoryCarrier() if name == "shared-memory" else DiskCarrier(folder / "buckets")


def main():
    name, folder = sys.argv[1], Path(sys.argv[2])
    held = {}
    receiver = Receiver(carrier(name, folder, 1), apply=lambda manifest, tensors: held.update(tensors))
    read, write = sys.stdin.buffer, sys.stdout.buffer
    while True:
        method, arguments = pickle.load(read)
        if method == "stop":
            break
        try:
            if method == "held":
                answer = ("ok", {key: value.clone() for key, value in held.items()})
            else:
                answer = ("ok", getattr(receiver, method)(*arguments))
        except Exception as error:  # noqa: BLE001 - sent back
            answer = ("error", f"{type(error).__name__}: {error}")
        pickle.dump(answer, write)
        write.flush()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
