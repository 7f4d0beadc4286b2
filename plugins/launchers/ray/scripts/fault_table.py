"""Kill each kind of worker in each phase of a run, let some hang, and write down what came of it.

    python plugins/launchers/ray/scripts/fault_table.py docs/explanation/faults.md [killed-rollout-score ...]

Writes the table between the two marks of that page; of a table that is there, the rows that are named, or all of it.
Takes some twelve minutes on two cores. Ends with 1 when a run that continued or was resumed does not give the numbers
of an undisturbed one, or when a process is left.
"""

from __future__ import annotations

import re
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "support"))

import ray_clusters
from fault_runs import APART, METHOD, last_good_step, still_alive, strike
from small_runs import events, run, steps, tensors
from unirl.core.errors import UniRLError

ROLES = ("train", "rollout", "reward")
HUNG = (
    ("rollout", "sync"),
    ("rollout", "generate"),
    ("rollout", "score"),
    ("rollout", "fetch"),
    ("reward", "score"),
    ("train", "train"),
    ("train", "checkpoint"),
)
"""A hung worker is noticed only if it is called or waited for; these are."""
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


@dataclass(frozen=True, kw_only=True)
class Cell:
    role: str
    how: str
    phase: str
    said: str
    lost: str
    equal: str
    left: str

    @property
    def is_good(self) -> bool:
        return self.equal in ("yes", "no run was made") and self.left == "none"


def main() -> int:
    page, named = Path(sys.argv[1]), sys.argv[2:]
    blows = {f"killed-{role}-{phase}": (role, phase, signal.SIGKILL) for phase in METHOD for role in ROLES}
    blows |= {f"hung-{role}-{phase}": (role, phase, signal.SIGSTOP) for role, phase in HUNG}
    text = page.read_text(encoding="utf-8")
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    rows = {"-".join([row[2], row[1], row[3]]): line for line in text[start:end].splitlines() if (row := _row(line))}
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ray_clusters.own():
            whole = run(folder / "whole", *APART).folder
            for key in named or blows:
                cells.append(_struck(*blows[key], folder / key, whole))
                c = cells[-1]
                rows[key] = f"| {c.role} | {c.how} | {c.phase} | {c.said} | {c.lost} | {c.equal} | {c.left} |"
                sys.stderr.write(f"{rows[key]}\n")
    head = ["| worker | is | in phase | what was said | steps to do again | run equal | processes left |"]
    head.append("| --- | --- | --- | --- | --- | --- | --- |")
    lines = [*head, *(rows[key] for key in blows if key in rows)]
    page.write_text(text[:start] + "\n" + "\n".join(lines) + "\n" + text[end:], encoding="utf-8")
    bad = [cell for cell in cells if not cell.is_good]
    for cell in bad:
        sys.stderr.write(f"{cell}\n")
    return 1 if bad else 0


def _struck(role: str, phase: str, how: signal.Signals, folder: Path, whole: Path) -> Cell:
    with strike(role, phase, how=how) as struck:
        try:
            run(folder, *APART)
            error = None
        except UniRLError as raised:
            error = raised
    left = still_alive(struck.all_pids)
    if error is None:
        findings = [event["text"] for event in events(folder, "finding")]
        reply = f"goes on: {findings[0]}" if findings else "nothing: nobody asked it for anything more"
        lost = "none"
    elif folder.exists():
        reply, lost = str(error), str(2 - last_good_step(folder))
        run(folder, *APART, resume=folder)
    else:
        reply, lost = str(error), "all"
    return Cell(
        role=role,
        how="killed" if how is signal.SIGKILL else "hung",
        phase=phase,
        said=_general(reply),
        lost=lost,
        equal="no run was made" if not folder.exists() else "yes" if _are_equal(whole, folder) else "NO",
        left="none" if not left else f"{len(left)}",
    )


def _row(line: str) -> list[str]:
    """The cells of a row of the table, from 1; empty for its head."""
    cells = [cell.strip() for cell in line.split("|")]
    return cells if len(cells) > 3 and cells[1] in ROLES else []


def _general(text: str) -> str:
    """Without the numbers of this run, and what only Ray's developers read."""
    text = re.sub(r"\(host \S+, process \d+\)", "(host …, process …)", text.replace("launcher: ", ""))
    text = re.sub(r" died in phase ('[^']*'): .*?(?= Its work is done again|$)", r" died in phase \1.", text)
    text = re.sub(r" (in|for) [\d.]+ s\b", r" \1 … s", text)
    return text.replace("|", "\\|")


def _are_equal(left: Path, right: Path) -> bool:
    """Losses and rewards of each step, and all that is saved, bit for bit."""
    for key in ("loss", "reward_mean", "reward_std", "grad_norm"):
        if [numbers[key] for numbers in steps(left).values()] != [numbers[key] for numbers in steps(right).values()]:
            return False
    expected, result = tensors(left, 2), tensors(right, 2)
    return expected.keys() == result.keys() and all(
        value.equal(result[name]) if hasattr(value, "equal") else value == result[name]
        for name, value in expected.items()
    )


if __name__ == "__main__":
    sys.exit(main())
