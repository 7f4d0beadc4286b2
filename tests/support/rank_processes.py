"""Rank processes for tests: `python SCRIPT RANK ...`, none of which outlives the call."""

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["launch"]


def launch(script: Path, *words: object, ranks: int, deadline_s: float = 240) -> None:
    """Run a script once per rank, as `script RANK *words`. Fails with the output of all ranks when one fails."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # They find modules where this process does.
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=deadline_s)[0] for process in processes]
        # One rank that fails takes the others with it, and they say less.
        assert not any(process.returncode for process in processes), "\n".join(outputs)
    finally:
        for process in processes:
            process.kill()
            process.wait()
