"""The receiving process of the transfer tests: `python transfer_receiver.py CARRIER FOLDER`, spoken to over its pipes.

Reads pickled (method, arguments) from stdin, answers with pickled ("ok", value) or ("error", text) on stdout.
"""

import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from unirl.transfer.weights.carriers import (
    ByValueCarrier,
    CollectiveCarrier,
    CudaIpcCarrier,
    DiskCarrier,
    SharedMemoryCarrier,
)
from unirl.transfer.weights.group import WeightGroup
from unirl.transfer.weights.transfer import Receiver


def carrier(name, folder, rank):
    """The carrier of one side."""
    if name == "collective":
        store = dist.FileStore(str(folder / "store"), 2)
        return CollectiveCarrier(WeightGroup(store, rank=rank, world=2, device=torch.device("cpu"), timeout_s=60))
    if name == "cuda-ipc":
        return CudaIpcCarrier()
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
                answer = ("ok", {key: value.cpu().clone() for key, value in held.items()})
            else:
                answer = ("ok", getattr(receiver, method)(*arguments))
        except Exception as error:  # noqa: BLE001 - sent back
            answer = ("error", f"{type(error).__name__}: {error}")
        pickle.dump(answer, write)
        write.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
