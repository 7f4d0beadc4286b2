"""One measured run: a recipe for a few steps in a separate process, and what it took."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unirl.core.errors import RunFailed
from unirl.core.observe.events import read_events
from unirl.core.observe.recorded import Recorded
from unirl.loop.run_folder import CHECKPOINTS, EVENTS_FILE

from .results import Run, Step, Subject

if TYPE_CHECKING:
    from unirl.core.types.event import Event

__all__ = ["WORKLOADS", "measure"]

WORKLOADS = {
    "image": "quickstart",
    "text": "quickstart-text",
    "video": "quickstart-video",
    "edit": "quickstart-edit",
}
"""Name -> recipe, of miniatures that run anywhere. Every other recipe is a workload by its own name."""
NO_EXTRAS = ("eval.every=0", "data.eval=''", "run.media_every=0", "run.save_every=0")
"""What a run does besides its steps."""
TOP_OPERATIONS = 15
OPERATIONS = "operations.json"
METRICS = ("perf/", "logp_mismatch")
"""Beginnings of the names of metrics that results keep."""


def measure(
    subject: Subject, folder: Path, *, steps: int, seed: int, repeat: int, profile: bool, allows_code: bool
) -> Run:
    """Run a workload in a new process, into a new folder. steps: those that count.  profile: record a trace of them,
    which slows them down.  allows_code: as the catalog of the command does.

    The checkpoint that every run ends with is removed.

    Raises RunFailed with the last lines of its output when it fails.
    """
    folder.mkdir(parents=True)
    words = [f"run.seed={seed}", f"run.max_steps={subject.warmup + steps}", f"run.dir={folder / 'run'}"]
    job = {
        "recipe": subject.recipe,
        "overrides": [*subject.overrides, *words],
        "warmup": subject.warmup,
        "folder": str(folder),
        "profile": profile,
        "is_alone": subject.planned_bytes is not None,
        "allows_code": allows_code,
    }
    output = folder / "output.txt"
    with output.open("w", encoding="utf-8") as file:
        command = [sys.executable, "-m", __name__, json.dumps(job)]
        code = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, env=dict(os.environ), check=False
        ).returncode
    if code:
        lines = output.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
        raise RunFailed(
            f"{subject.name}: its process ended with code {code}. The end of {output}:\n" + "\n".join(lines)
        )
    shutil.rmtree(folder / "run" / CHECKPOINTS, ignore_errors=True)
    memory: dict[str, Any] = json.loads((folder / "memory.json").read_text(encoding="utf-8"))
    events = read_events(folder / "run" / EVENTS_FILE)
    return Run(
        workload=subject.name,
        seed=seed,
        repeat=repeat,
        steps=tuple(_step(event) for event in events if event.kind == "step" and event.step > subject.warmup),
        peak_bytes=memory["bytes"],
        device=memory["device"],
        is_profiled=profile,
    )


def _step(event: Event) -> Step:
    read = Recorded(where=event.read_from, values=event.data)
    phases, metrics = read.numbers("phases"), read.numbers("metrics")
    kept = {name: value for name, value in metrics.items() if name.startswith(METRICS) and math.isfinite(value)}
    return Step(seconds=sum(phases.values()), samples=read.count("samples"), phases=phases, metrics=kept)


def main(job: dict[str, Any]) -> None:
    """The measured process. Writes `memory.json`, and with a profile `trace.json.gz` and `operations.json`."""
    import torch
    from unirl.core.cli.discovery import discover
    from unirl.core.recipe.compose import compose
    from unirl.loop.run import train

    folder, catalog = Path(job["folder"]), discover()
    catalog.allows_code = job["allows_code"]
    plan = compose(job["recipe"], job["overrides"], catalog=catalog)
    before = _memory("VmRSS")
    if before is not None:
        # What imports took for a moment is not the run's; 5 sets the peak to what is resident now, see proc(5).
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    listeners = [_profiler(folder, after=job["warmup"], last=plan.run.max_steps)] if job["profile"] else []
    train(plan, catalog=catalog, overrides=job["overrides"], listeners=listeners)
    on_gpu = torch.cuda.is_available() and torch.cuda.max_memory_allocated() > 0
    if on_gpu:
        peak: int | None = torch.cuda.max_memory_allocated()
    else:
        highest = _memory("VmHWM")
        peak = None if before is None or highest is None else highest - before
    device = torch.cuda.get_device_name() if on_gpu else "cpu"
    (folder / "memory.json").write_text(
        json.dumps({"bytes": peak if job["is_alone"] else None, "device": device}), encoding="utf-8"
    )


def _profiler(folder: Path, *, after: int, last: int) -> Any:
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def listen(event: Event) -> None:
        if event.step == after and event.kind == ("step" if after else "run_started"):
            profiler.start()
        elif event.kind == "step" and event.step == last:
            profiler.stop()
            profiler.export_chrome_trace(str(folder / "trace.json.gz"))
            on_gpu = any(one.self_device_time_total for one in profiler.key_averages())
            times = {
                one.key: one.self_device_time_total if on_gpu else one.self_cpu_time_total
                for one in profiler.key_averages()
            }
            top = sorted(times.items(), key=lambda pair: -pair[1])[:TOP_OPERATIONS]
            total = sum(times.values()) or 1
            rows = [{"name": name, "seconds": micros / 1e6, "share": micros / total} for name, micros in top]
            (folder / OPERATIONS).write_text(json.dumps(rows), encoding="utf-8")

    return listen


def _memory(field: str) -> int | None:
    """`VmRSS` or `VmHWM` of this process, its resident memory and the peak of it, in bytes; None where the system does
    not say."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return None
    return int(status.partition(f"{field}:")[2].split()[0]) * 1024


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
