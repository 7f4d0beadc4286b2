"""Training on the SDE steps of a micro-batch together (`train.replay=stacked`) against one after the other (`serial`).

    python benchmarks/replay.py [--pairs 3] [--threads 1]

The quickstart with LoRA, 48 samples, five scored steps, by rows of a micro-batch and branches of the guidance: seconds
of the training phase (old log-probs, gradients, two updates), minima over pairs, and the activations that a backward
pass keeps, as `unirl plan` counts them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from unirl.core.data.prompts import PromptOrder, read_prompts
from unirl.core.observe.events import Event, EventStream
from unirl.core.observe.tracking import Trackers
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.loop.build import build_parts
from unirl.loop.step import run_step
from unirl.tools.plan.memory_plan import memory_plan

WAYS = ("stacked", "serial")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{'rows':>5} {'branches':>9} {'stacked':>18} {'serial':>18} {'time':>6} {'memory':>7}")
    for guidance in (1.0, 3.0):
        for rows in (2, 8, 24):
            compare(rows, guidance, options=options)


def compare(rows: int, guidance: float, *, options: argparse.Namespace) -> None:
    runs = {way: training(rows, guidance, way, threads=options.threads) for way in WAYS}
    best = dict.fromkeys(WAYS, float("inf"))
    for pair in range(options.pairs + 1):
        for way, (step, _) in runs.items():
            seconds = step(pair)
            if pair:  # the first pair warms up
                best[way] = min(best[way], seconds)
    kept = {way: held for way, (_, held) in runs.items()}
    cells = [f"{best[way]:6.2f} s, {kept[way] / 2**20:5.0f} MiB" for way in WAYS]
    print(
        f"{rows:5} {1 if guidance == 1 else 2:9} {cells[0]:>18} {cells[1]:>18} {best['serial'] / best['stacked']:6.2f} "
        f"{kept['serial'] / kept['stacked']:7.2f}",
        flush=True,
    )


def training(rows: int, guidance: float, way: str, *, threads: int) -> tuple[Callable[[int], float], int]:
    """A function that takes a step and returns the seconds of its training, and the planned bytes of activations."""
    catalog = Catalog.discover()
    words = (
        *("data.prompts_per_step=4", "data.samples_per_prompt=12", "backend.trains=lora", "train.updates_per_step=2"),
        *(f"train.micro_batch_size={rows}", f"train.replay={way}", f"sampling.guidance_scale={guidance}"),
        *(f"run.threads={threads}", "run.device=cpu", "run.media_every=0", "run.max_steps=1000", "~tracker.report"),
    )
    plan = compose("quickstart", words, catalog=catalog)
    (process,) = memory_plan(plan, catalog=catalog).processes
    parts, events, phases = build_parts(plan, catalog=catalog), EventStream(), dict[str, float]()

    def listen(event: Event) -> None:
        if event.kind == "step":
            phases.update(event.data["phases"])

    events.listen(listen)
    prompts = read_prompts(Path(plan.data.train))
    order = PromptOrder(len(prompts), plan.data.prompts_per_step, seed=plan.run.seed, shuffle=plan.data.shuffle)

    def step(number: int) -> float:
        chosen = [prompts[index] for index in order.step(number)]
        run_step(parts, plan, chosen, step=number, events=events, trackers=Trackers({}, events))
        return phases["train"]

    return step, process.items["activations"]


if __name__ == "__main__":
    main()
