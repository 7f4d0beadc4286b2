"""Runtime overhead: a step under Ray against the same step in this process, replay on two ranks, and checksums.

    python benchmarks/runtime.py [--steps 5]

Steps of the variants are interleaved; prints minima, without the first step of each. The first two tables train the
quickstart's recipe; two ranks share the machine's cores. The last one sends random weights through shared memory, with
checksums on both sides, and times the sender's separately.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import ray
import torch
from unirl.core.data.prompts import PromptOrder, read_prompts
from unirl.core.observe.events import EventStream
from unirl.core.observe.tracking import Trackers
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.roles import WeightUpdate
from unirl.core.types.event import Event
from unirl.core.types.weights import checksum
from unirl.launchers.ray.launcher import RayLauncher
from unirl.launchers.ray.ray_worker import SETTINGS
from unirl.loop.step import run_step
from unirl.transfer.weights.carriers import SharedMemoryCarrier
from unirl.transfer.weights.transfer import Receiver, send

COMMON = [
    "run.threads=1",
    "run.media_every=0",
    "run.max_steps=100000",
    "advantage.constant_reward=skip",
    "~tracker.report",
]
LAUNCHERS = {
    "local": [],
    "ray, trainside": ["launcher=ray"],
    "ray, separate": ["launcher=ray", "launcher.placement=separate"],
}
REPLAYS = {name: ["launcher=ray", "launcher.train_ranks=2", f"train.replay={name}"] for name in ("serial", "stacked")}
Step = Callable[[int], Event]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=256 * 2**20,
        runtime_env={"env_vars": {**SETTINGS, "OMP_NUM_THREADS": "1"}},
    )
    try:
        for title, variants in (("a step", LAUNCHERS), ("two ranks", REPLAYS)):
            compare(title, variants, steps=options.steps)
    finally:
        ray.shutdown()
    checksums()


def compare(title: str, variants: Mapping[str, list[str]], *, steps: int) -> None:
    result: dict[str, list[Event]] = {name: [] for name in variants}
    with ExitStack() as stack:
        run = {name: launched([*COMMON, *words], stack) for name, words in variants.items()}
        for number in range(steps + 1):
            for name, step in run.items():
                event = step(number)
                if number:  # the first step warms up
                    result[name].append(event)
    phases = ("sync", "generate", "score", "train")
    print(f"{title:16} {'step':>9} " + " ".join(f"{phase:>10}" for phase in phases) + f" {'driver, per sample':>20}")
    for name, events in result.items():
        seconds = [event.data["phases"] for event in events]
        whole = min(sum(each.values()) for each in seconds)
        parts = " ".join(f"{min(each.get(phase, 0.0) for each in seconds) * 1000:7.0f} ms" for phase in phases)
        sent = events[-1].data["metrics"].get("driver/bytes_per_sample")
        print(f"{name:16} {whole * 1000:6.0f} ms {parts} {f'{sent:.0f} B' if sent else '-':>20}", flush=True)


def launched(words: list[str], stack: ExitStack) -> Step:
    """The quickstart with these settings, as a function that runs the step with a given number."""
    catalog = Catalog.discover()
    plan = compose("quickstart", words, catalog=catalog)
    assert plan.launcher is not None
    launcher = catalog.resolve(plan.launcher.spec.build)(plan.launcher.config)
    stack.callback(launcher.close)
    parts = launcher.launch(plan, catalog=catalog)
    events = EventStream()
    seen: list[Event] = []
    events.listen(seen.append)
    rows = read_prompts(Path(plan.data.train))
    order = PromptOrder(len(rows), plan.data.prompts_per_step, seed=plan.run.seed, shuffle=plan.data.shuffle)
    assert not isinstance(launcher, RayLauncher) or ray.is_initialized()

    def step(number: int) -> Event:
        chosen = [rows[index] for index in order.step(number)]
        run_step(parts, plan, chosen, step=number, events=events, trackers=Trackers({}, events))
        return next(event for event in reversed(seen) if event.kind == "step")

    return step


def checksums() -> None:
    """Shared memory within one process: both sides run on one core, without a network."""
    print(f"{'weights':>10} {'tensors':>8} {'whole transfer':>16} {'checksums of a side':>20} {'share':>7}")
    for megabytes, count in ((1, 64), (64, 64), (512, 128)):
        tensors = {f"layer.{n}": torch.randn(megabytes * 2**18 // count) for n in range(count)}
        update = WeightUpdate(version=1, tensors=tensors, kind="full", checksum=checksum(tensors))
        reports = []
        for _ in range(5):
            carrier = SharedMemoryCarrier()
            held = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
            receiver = Receiver(carrier, holds=held, apply=lambda manifest, found, held=held: held.update(found))
            reports.append(
                send(update, carrier=carrier, begin=receiver.begin, take=receiver.take, finish=receiver.finish)
            )
        best = min(reports, key=lambda report: report.seconds)
        share = best.checksum_seconds / best.seconds
        print(
            f"{megabytes:6} MiB {count:8} {best.seconds * 1000:13.0f} ms {best.checksum_seconds * 1000:17.0f} ms "
            f"{share:6.0%}"
        )


if __name__ == "__main__":
    main()
