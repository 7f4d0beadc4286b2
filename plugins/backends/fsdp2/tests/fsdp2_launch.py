"""Rank processes for tests: `python SCRIPT RANK STORE FOLDER`, all ended for certain."""

import os
import subprocess
import sys
from pathlib import Path

DEADLINE_S = 240


def launch(script: Path, folder: Path, *, ranks: int) -> None:
    """Run a script on so many gloo ranks, and fail with the output of all when one does."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(folder / "store"), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
        # One rank that fails takes the others with it, and they say less.
        assert not any(process.returncode for process in processes), "\n".join(outputs)
    finally:
        for process in processes:
            process.kill()
            process.wait()
