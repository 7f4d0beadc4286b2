"""A training step of UniRL against the hand-written loop: same model, batch and steps, interleaved in one process.

    python benchmarks/step_overhead.py [--pairs 6] [--threads 1]

Two sizes: the quickstart's denoiser, and one whose forward takes at least 50 ms. Both loops do the same work: old
log-probs from the rollout, serial replay of the SDE steps, two updates. Prints minima over the pairs of wall time and
CPU time, and their ratio.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bare_loop import BareLoop, Settings
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from unirl.core.data.prompts import PromptOrder, read_prompts
from unirl.core.observe.events import EventStream
from unirl.core.observe.tracking import Trackers
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.loop.build import build_parts
from unirl.loop.step import run_step
from unirl.quickstart import checkpoint_path

WIDE = {"num_layers": 6, "num_attention_heads": 8, "attention_head_dim": 48, "caption_projection_dim": 384}
"""A denoiser of 17 M parameters, whose forward at batch size 32 takes some 100 ms on one core."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        wide = widened(Path(folder))
        print(f"{'denoiser':12} {'rows':>5} {'forward':>10} {'bare loop':>20} {'UniRL':>20} {'ratio':>16}")
        for name, path, prompts, samples in (("quickstart", checkpoint_path(), 16, 12), ("wide", wide, 4, 8)):
            compare(name, Path(path), prompts=prompts, samples=samples, options=options)


def widened(folder: Path) -> Path:
    """The quickstart's pipeline with a larger, random denoiser."""
    torch.manual_seed(0)
    pipeline = StableDiffusion3Pipeline.from_pretrained(
        checkpoint_path(), local_files_only=True, trust_remote_code=False
    )
    pipeline.transformer = SD3Transformer2DModel.from_config({**pipeline.transformer.config, **WIDE})
    pipeline.save_pretrained(folder / "wide")
    return folder / "wide"


def compare(name: str, path: Path, *, prompts: int, samples: int, options: argparse.Namespace) -> None:
    bare = BareLoop(Settings(checkpoint=str(path), prompts_per_step=prompts, samples_per_prompt=samples))
    ours = our_step(path, prompts=prompts, samples=samples, threads=options.threads)
    best = {"bare": [float("inf")] * 2, "ours": [float("inf")] * 2}
    for pair in range(options.pairs + 1):
        for who, step in (("bare", bare.train_step), ("ours", ours)):
            wall, cpu = timed(step, pair)
            if pair:  # the first pair warms up
                best[who] = [min(best[who][0], wall), min(best[who][1], cpu)]
    forward = forward_time(bare, prompts * samples)
    columns = [f"{wall:6.2f} s, CPU {cpu:5.2f}" for wall, cpu in best.values()]
    ratios = [our / theirs for our, theirs in zip(best["ours"], best["bare"], strict=True)]
    print(
        f"{name:12} {prompts * samples:5} {forward * 1000:7.0f} ms {columns[0]:>20} {columns[1]:>20} "
        f"{ratios[0]:7.3f}, {ratios[1]:6.3f}",
        flush=True,
    )


def our_step(path: Path, *, prompts: int, samples: int, threads: int) -> Callable[[int], object]:
    catalog = Catalog.discover()
    overrides = [
        f"model.path={path}",
        f"model.decode_batch={Settings().decode_batch}",
        f"data.prompts_per_step={prompts}",
        f"data.samples_per_prompt={samples}",
        f"run.threads={threads}",
        "run.media_every=0",
        "run.max_steps=1000",
        "train.old_log_probs=engine",
        "train.replay=serial",
        "train.updates_per_step=2",
        "backend.trains=full",
        # The rule cannot read images of a random denoiser; the timing does not depend on the scores.
        "advantage.constant_reward=fail" if path == Path(checkpoint_path()) else "+reward@reward.light=brightness",
        "~tracker.report",
    ]
    plan = compose("quickstart", overrides, catalog=catalog)
    parts = build_parts(plan, catalog=catalog)
    events = EventStream()
    trackers = Trackers({}, events)
    rows = read_prompts(Path(plan.data.train))
    order = PromptOrder(len(rows), plan.data.prompts_per_step, seed=plan.run.seed, shuffle=plan.data.shuffle)

    def step(number: int) -> None:
        chosen = [rows[index] for index in order.step(number)]
        run_step(parts, plan, chosen, step=number, events=events, trackers=trackers)

    return step


def timed(step: Callable[[int], object], number: int) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    step(number)
    return time.perf_counter() - wall, time.process_time() - cpu


@torch.no_grad()
def forward_time(bare: BareLoop, rows: int) -> float:
    prompts = (bare.train_prompts * rows)[:rows]
    conditions = bare._conditions(prompts)
    channels, size = bare.transformer.config.in_channels, bare.transformer.config.sample_size
    x = torch.randn(rows, channels, size, size)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        bare._velocity(x, 3, conditions)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


if __name__ == "__main__":
    main()
