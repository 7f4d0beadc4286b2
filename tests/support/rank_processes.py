"""Rank processes for tests, none of which outlives the call: forks of one process that has imported the script, for
imports are most of their seconds."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

__all__ = ["launch", "save_found"]


def launch(script: Path, *words: object, ranks: int, deadline_s: float = 240) -> None:
    """Call a script's `main()` once per rank, as `script RANK *words`. Fails with the output of all ranks when one
    fails."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, str(rank)) for rank in range(ranks)]
        parent = subprocess.Popen(
            [sys.executable, __file__, folder, str(ranks), str(script), *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # They find modules where this process does.
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
        )
        try:
            said = parent.communicate(timeout=deadline_s)[0]
            # One rank that fails takes the others with it, and they say less.
            assert not parent.returncode, "\n".join([said, *(path.read_text() for path in outputs if path.exists())])
        finally:
            if parent.poll() is None:
                # The ranks as well.
                os.killpg(parent.pid, signal.SIGKILL)
                parent.wait()


def save_found(find: Callable[[int, Path], object], *, ranks: int) -> None:
    """`main()` of a script `RANK STORE FOLDER`: calls `find(rank, FOLDER)` on every rank of a gloo group, and saves
    what rank 0 found as FOLDER/found.pt."""
    import torch
    import torch.distributed as dist

    rank, store, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    found = find(rank, folder)
    if rank == 0:
        torch.save(found, folder / "found.pt")
    dist.barrier()
    dist.destroy_process_group()


def main(folder: str, ranks: int, script: str, *words: str) -> None:
    sys.path[0] = str(Path(script).parent)
    call = importlib.import_module(Path(script).stem).main
    sys.stdout.flush()
    pids: list[int] = []
    for rank in range(ranks):
        if not (pid := os.fork()):
            run_rank(call, [script, str(rank), *words], Path(folder, str(rank)))
        pids.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    sys.exit(any(statuses))


def run_rank(call: Callable[[], None], arguments: list[str], output: Path) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = arguments
    status = 0
    try:
        call()
    except BaseException:  # noqa: BLE001 - a process ends here, and says why as any other does
        status = 1
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
