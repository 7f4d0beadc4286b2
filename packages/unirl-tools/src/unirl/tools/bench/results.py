"""Results of a benchmark: JSON lines with a version, one for the machine, each workload and each run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from unirl.core.errors import RunFolderError
from unirl.core.observe.recorded import Recorded

__all__ = ["RESULTS", "SCHEMA", "Results", "Run", "Step", "Subject", "load", "save"]

SCHEMA = 1
RESULTS = "results.jsonl"


@dataclass(frozen=True, kw_only=True)
class Step:
    seconds: float
    """Sum of its phases."""
    samples: int
    phases: Mapping[str, float]
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Run:
    workload: str
    seed: int
    repeat: int
    steps: tuple[Step, ...]
    peak_bytes: int | None
    """Largest memory: allocated on the GPU; on a CPU by how much resident memory rose, which has libraries that were
    loaded meanwhile, too. None where other processes generate or train, or the system does not say."""
    device: str
    is_profiled: bool = False
    """Its times count for nothing."""

    @property
    def seconds(self) -> float:
        """Median of its steps."""
        return median(step.seconds for step in self.steps)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A workload as it was measured."""

    name: str
    recipe: str
    overrides: tuple[str, ...]
    plan_hash: str
    """Of the resolved recipe, without the seed, the folder and the number of steps."""
    warmup: int
    planned_bytes: int | None
    """Of the training process, by `unirl plan`."""
    flops: Mapping[str, float] = field(default_factory=lambda: dict[str, float]())
    """Phase -> operations of each device in a step, by `unirl plan`."""
    peak_tflops: float | None = None
    """Dense bf16 peak of a device, where it is known."""
    operations: tuple[Mapping[str, Any], ...] = ()
    """Those that took longest in the profiled run: `name`, `seconds` without what they called, and `share`."""


@dataclass(frozen=True, kw_only=True)
class Results:
    environment: Mapping[str, str]
    subjects: tuple[Subject, ...]
    runs: tuple[Run, ...]

    def of(self, name: str) -> list[Run]:
        """The runs of a workload whose times count."""
        return [run for run in self.runs if run.workload == name and not run.is_profiled]


def save(results: Results, folder: Path) -> None:
    lines = [
        {"kind": "bench", "schema": SCHEMA, "environment": dict(results.environment)},
        *({"kind": "workload", **asdict(subject)} for subject in results.subjects),
        *({"kind": "run", **asdict(run)} for run in results.runs),
    ]
    text = "".join(f"{json.dumps(line, allow_nan=False)}\n" for line in lines)
    (folder / RESULTS).write_text(text, encoding="utf-8")


def load(folder: Path) -> Results:
    """Raises RunFolderError for a folder without results, or with others than this version reads."""
    file = folder / RESULTS
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        read = [Recorded(where=f"{file}:{number}", values=line) for number, line in enumerate(lines, start=1)]
        head = read[0]
        if head.text("kind") != "bench":
            raise ValueError(f"{head.where}: got no line of the kind 'bench'")
        if (schema := head.count("schema")) != SCHEMA:
            raise ValueError(f"{head.where}: got schema {schema}, this version reads {SCHEMA}")
        kinds = {kind: [line for line in read[1:] if line.text("kind") == kind] for kind in ("workload", "run")}
        return Results(
            environment={name: str(value) for name, value in head.section("environment").values.items()},
            subjects=tuple(_subject(line) for line in kinds["workload"]),
            runs=tuple(_run(line) for line in kinds["run"]),
        )
    except FileNotFoundError as error:
        raise RunFolderError(
            f"{folder}: got no {RESULTS} in it, expected a folder that `unirl bench --to` wrote."
        ) from error
    except (OSError, ValueError, IndexError, AttributeError) as error:
        raise RunFolderError(f"{file}: cannot be read: {error}.") from error


def _subject(line: Recorded) -> Subject:
    return Subject(
        name=line.text("name"),
        recipe=line.text("recipe"),
        overrides=tuple(line.texts("overrides")),
        plan_hash=line.text("plan_hash"),
        warmup=line.count("warmup"),
        planned_bytes=line.optional_count("planned_bytes"),
        flops=line.numbers("flops"),
        peak_tflops=line.optional_number("peak_tflops"),
        operations=tuple(
            {"name": one.text("name"), "seconds": one.number("seconds"), "share": one.number("share", most=1)}
            for one in line.sections("operations")
        ),
    )


def _run(line: Recorded) -> Run:
    return Run(
        workload=line.text("workload"),
        seed=line.count("seed"),
        repeat=line.count("repeat"),
        steps=tuple(
            Step(
                seconds=one.number("seconds"),
                samples=one.count("samples"),
                phases=one.numbers("phases"),
                metrics=one.numbers("metrics"),
            )
            for one in line.sections("steps")
        ),
        peak_bytes=line.optional_count("peak_bytes"),
        device=line.text("device"),
        is_profiled=line.flag("is_profiled"),
    )
