"""The README of a folder of evidence: what was measured, beside what was predicted.

python benchmarks/gpu/report.py FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from predictions import CARDS, Prediction, card_of, predictions

__all__ = ["write_report"]

FILES = {
    "results.json": "the machine, and of each part its state, seconds, numbers and rounds",
    "log.txt": "the output of every command; paths of the machine are replaced",
    "profile.txt": "kernels of a round of `sd3-fsdp` by time, and how long the GPU had nothing to do",
    "conformance.json": "claims on the GPU, as `unirl conformance` writes them",
    "memory.csv": "MiB of the card and of each process during parts with several processes, five times a second",
}


def main() -> None:
    write_report(Path(sys.argv[1]))


def write_report(folder: Path) -> None:
    """Write README.md from `results.json`."""
    results = json.loads((folder / "results.json").read_text())
    machine, parts = results["machine"], results["parts"]
    card = card_of(machine["device"])
    expected = predictions(CARDS[card]) if card and not machine["dry"] else []
    (folder / "README.md").write_text(
        "\n".join([*_head(machine), *_states(parts), *_comparison(parts, expected, machine), *_files(folder), ""])
    )


def _head(machine: Mapping[str, Any]) -> Iterator[str]:
    memory = f", {machine['memory_gib']} GiB" if machine["memory_gib"] else ""
    yield f"# {machine['device']}, {machine['date']}"
    yield ""
    if machine["dry"]:
        yield "**A dry run: tiny sizes, to try the kit. Its numbers are evidence of nothing.**"
        yield ""
    yield f"{machine['device']}{memory}; driver {machine['driver'] or 'none'}, CUDA {machine['cuda'] or 'none'}, Python"
    yield f"{machine['python']}; {', '.join(f'{name} {found}' for name, found in machine['versions'].items())}."
    if machine["commit"]:
        yield f"Commit {machine['commit']}."
    yield "Written by `benchmarks/gpu/report.py`; predictions and formulas: `benchmarks/gpu/README.md`."
    yield ""


def _states(parts: Mapping[str, Any]) -> Iterator[str]:
    counts = {state: sum(part["state"] == state for part in parts.values()) for state in STATES}
    yield f"## Parts: {', '.join(f'{number} {state}' for state, number in counts.items() if number)}"
    yield ""
    yield "| part | state | seconds | limit |"
    yield "| --- | --- | --- | --- |"
    for name, part in parts.items():
        state = f"{part['state']}: {part['reason']}" if "reason" in part else part["state"]
        yield f"| {name} | {state} | {part['seconds']:.1f} | {part['limit_s']:g} |"
    yield ""


STATES = ("done", "failed", "timed out", "not run")


def _comparison(parts: Mapping[str, Any], expected: list[Prediction], machine: Mapping[str, Any]) -> Iterator[str]:
    by_key = {(one.part, one.measure): one for one in expected}
    yield "## Measured against predicted"
    yield ""
    if not expected:
        yield f"Nothing is predicted for {'a dry run' if machine['dry'] else machine['device']}."
        yield ""
    yield "| part | measure | measured | predicted | ratio | |"
    yield "| --- | --- | --- | --- | --- | --- |"
    measured = {(name, key): value for name, part in parts.items() for key, value in part.get("measures", {}).items()}
    for part, measure in sorted(measured.keys() | by_key.keys(), key=lambda key: _place(key, parts)):
        yield _row(part, measure, measured.get((part, measure)), by_key.get((part, measure)))
    yield ""


def _place(key: tuple[str, str], parts: Mapping[str, Any]) -> tuple[int, str, str]:
    """In the order in which parts ran; those that did not, last."""
    return (list(parts).index(key[0]) if key[0] in parts else len(parts), *key)


def _row(part: str, measure: str, value: float | None, expected: Prediction | None) -> str:
    shown = "not run" if value is None else f"{value:.4g}"
    if expected is None:
        return f"| {part} | {measure} | {shown} | | | |"
    ratio = f"{value / expected.value:.2f}" if value is not None and expected.value else ""
    outside = value is not None and not expected.low <= value <= expected.high
    flag = f"**outside {expected.low:.3g} to {expected.high:.3g}**" if outside else ""
    return f"| {part} | {measure} | {shown} | {expected.value:.3g} | {ratio} | {flag} |"


def _files(folder: Path) -> Iterator[str]:
    yield "## Files"
    yield ""
    yield from (f"- `{name}`: {text}" for name, text in FILES.items() if (folder / name).is_file())


if __name__ == "__main__":
    main()
