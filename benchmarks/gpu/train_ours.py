"""A few rounds of UniRL's own loop, by the name of a run in `runs.py`: seconds by phase, throughput, memory, mismatch.

    python benchmarks/gpu/train_ours.py sd3-fsdp --work FOLDER --out FILE [--profile FILE] [--tiny]

`--profile` adds a table of the kernels of the last round, and how long the GPU had nothing to do. That round is slower;
the typical round is the one before it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from measure import DEVICE, FORWARD_FLOP, now, peaks_gib, throughput, write_measures
from runs import runs
from torch.profiler import ProfilerActivity, profile
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.types.event import Event
from unirl.loop.run import train

METRICS = ("logp_mismatch_max", "logp_mismatch_mean", "ratio_max_dev_first", "grad_norm")
GAP_US = 1000.0
"""Pauses of the GPU longer than this are counted one by one."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    run = runs(options.work, is_tiny=options.tiny, device=DEVICE)[options.name]
    catalog = Catalog.discover()
    plan = compose(run.recipe, run.words, catalog=catalog)
    listeners = [LastRound(options.profile, plan.run.max_steps)] if options.profile else []
    result = train(plan, catalog=catalog, overrides=run.words, listeners=listeners)
    steps = [event for event in events(result.folder) if event["kind"] == "step"]
    rounds = [phases(event["phases"]) for event in steps]
    measures = throughput(
        rounds[: -1 if options.profile else None],
        rows=run.rows,
        flop=0 if options.tiny else FORWARD_FLOP.get(run.model, 0),
        generated=run.generated,
        trained=run.trained,
    )
    worst = {name: max(values) for name in METRICS if (values := numbers(steps, name))}
    # With Ray the device is used by other processes.
    peaks = {} if "launcher=ray" in run.words else peaks_gib()
    write_measures(options.out, {**measures, **peaks, **worst}, rounds=rounds)


def events(folder: Path) -> Iterable[Mapping[str, Any]]:
    return map(json.loads, (folder / "events.jsonl").read_text().splitlines())


def phases(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each phase of a round, and their sum."""
    return {**{f"{name}_s": value for name, value in seconds.items()}, "round_s": sum(seconds.values())}


def numbers(steps: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    return [value for event in steps if (value := event["metrics"].get(name)) is not None]


class LastRound:
    """A listener of events that profiles the last round and writes what it found."""

    def __init__(self, file: Path, max_steps: int) -> None:
        self._file, self._max_steps, self._profile = file, max_steps, _profile()
        self._count = 0

    def __call__(self, event: Event) -> None:
        if event.kind != "step":
            return
        self._count += 1
        if self._count == self._max_steps - 1:
            self._profile.start()
        elif self._count == self._max_steps:
            now()
            self._profile.stop()
            self._file.write_text(kernels(self._profile))


def _profile() -> profile:
    return profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if DEVICE == "cuda" else [])])


def kernels(profiled: profile) -> str:
    """The forty operations that took most time, and the GPU's pauses."""
    order = f"self_{'device' if DEVICE == 'cuda' else 'cpu'}_time_total"
    table = profiled.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=90)
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiled.events() or ()
        if str(event.device_type).endswith("CUDA")
    )
    return f"{table}\n{idle(spans)}\n" if spans else table


def idle(spans: list[tuple[float, float]]) -> str:
    """How much of the time between the first and the last kernel no kernel ran. spans: microseconds, sorted."""
    pauses: list[float] = []
    end = spans[0][1]
    for begin, until in spans:
        if begin > end:
            pauses.append(begin - end)
        end = max(end, until)
    whole, long = end - spans[0][0], [pause for pause in pauses if pause > GAP_US]
    return (
        f"GPU busy {(whole - sum(pauses)) / 1e6:.3f} s of {whole / 1e6:.3f} s; {len(spans)} kernels; "
        f"{len(long)} pauses over {GAP_US / 1e3:g} ms, {sum(long) / 1e6:.3f} s together"
    )


if __name__ == "__main__":
    main()
