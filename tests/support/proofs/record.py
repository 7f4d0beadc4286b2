"""The record: which group was proven with which key, where and when. It is written by runs that passed, and
committed."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from heapq import heapreplace
from pathlib import Path

__all__ = ["PLACE", "Proof", "commit_of", "cpu", "read", "tenth", "tracked", "uncommitted", "write"]

PLACE = Path("tests") / "proven.json"
ONE_IN = 10
"""One of so many parts of what is proven runs all the same."""
SHORT_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Proof:
    """That a group passed as a whole."""

    key: str
    commit: str
    """The commit that was checked out."""
    machine: str
    """As `keys.instruction_set` names it; a group has one proof for each."""
    cpu: str
    """It counts on this one alone: numeric libraries have other code for other vendors."""
    num_tests: int
    seconds: float
    """Of all its tests, as one worker ran them."""


def read(root: Path) -> dict[tuple[str, str], Proof]:
    """By group and machine; none where there is no record yet."""
    if not (root / PLACE).is_file():
        return {}
    data: dict[str, list[dict[str, object]]] = json.loads((root / PLACE).read_text(encoding="utf-8"))
    proofs = [(group, Proof(**proof)) for group, result in data.items() for proof in result]  # type: ignore[arg-type]
    return {(group, proof.machine): proof for group, proof in proofs}


def write(root: Path, proofs: Mapping[tuple[str, str], Proof]) -> None:
    """Replace the record; one line for each proof, so that two branches meet in few."""
    groups: dict[str, list[Proof]] = {}
    for (group, _), proof in sorted(proofs.items()):
        groups.setdefault(group, []).append(proof)
    lines = [
        f"{json.dumps(group)}: [\n  " + ",\n  ".join(json.dumps(asdict(proof)) for proof in result) + "\n ]"
        for group, result in groups.items()
    ]
    (root / PLACE).write_text("{\n " + ",\n ".join(lines) + "\n}\n", encoding="utf-8")


def commit_of(root: Path) -> str:
    """Of the checkout; empty where it is none of git's."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def uncommitted(root: Path) -> list[str]:
    """Files that differ from the commit, but for what `--prove` writes itself."""
    done = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=True)
    changed = [line[3:] for line in done.stdout.splitlines()]
    return [path for path in changed if path not in (PLACE.as_posix(), "tests/durations.json")]


def tracked(root: Path) -> set[Path]:
    """The files of the repository, and those that will be: all but what git ignores, and what `--prove` writes."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, check=True)
    written = {PLACE.as_posix(), "tests/durations.json"}
    return {root.resolve() / path for path in done.stdout.splitlines() if path not in written}


def tenth(seconds: Mapping[str, float], commit: str) -> frozenset[str]:
    """What of this runs although it is proven: one of ten parts that take about as long, another one with every commit.

    seconds: of all that is proven, by name."""
    parts = [(0.0, part, list[str]()) for part in range(ONE_IN)]
    for name in sorted(seconds, key=lambda name: (-seconds[name], name)):
        total, part, names = parts[0]
        # Groups that take no time are spread as well.
        heapreplace(parts, (total + max(seconds[name], SHORT_S), part, [*names, name]))
    chosen = int(hashlib.sha256(commit.encode()).hexdigest(), 16) % ONE_IN
    return frozenset(name for _, part, names in parts if part == chosen for name in names)


def cpu() -> str:
    """The model of the processor."""
    info = Path("/proc/cpuinfo")
    result = re.search(r"^model name\s*:\s*(.*)$", info.read_text(), re.MULTILINE) if info.is_file() else None
    return result[1] if result else platform.processor() or platform.machine()
