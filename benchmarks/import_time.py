"""Start-up time of commands, each in a fresh process; minima of several runs."""

from __future__ import annotations

import subprocess
import sys
import time

COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import unirl.core.roles": [sys.executable, "-c", "import unirl.core.roles"],
    "unirl --help": [sys.executable, "-m", "unirl.core", "--help"],
    "unirl plugins --json": [sys.executable, "-m", "unirl.core", "plugins", "--json"],
    "unirl compose quickstart": [sys.executable, "-m", "unirl.core", "compose", "quickstart"],
    "import torch": [sys.executable, "-c", "import torch"],
}
ROUNDS = 7


def main() -> None:
    best = dict.fromkeys(COMMANDS, float("inf"))
    for _ in range(ROUNDS):
        for name, command in COMMANDS.items():
            start = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            best[name] = min(best[name], time.perf_counter() - start)
    for name, seconds in best.items():
        print(f"{name:28} {seconds * 1000:8.0f} ms")


if __name__ == "__main__":
    main()
