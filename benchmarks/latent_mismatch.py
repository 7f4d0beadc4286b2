"""Log-prob mismatch of diffusion rollouts in 16 bits, by dtype and image size.

    python benchmarks/latent_mismatch.py [--sizes 64,128,256,512] [--samples 8]

The quickstart's checkpoint samples under autocast to each dtype, with SDE noise at every step; the same weights in fp32
score the samples. Log-probs are averaged over the latent, so rounding errors average out in a large one.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from unirl.core.data.prompts import read_prompts
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.specs.plan import Plan
from unirl.core.types.track import Track
from unirl.loop.build import build_parts
from unirl.loop.parts import Parts
from unirl.loop.requests import build_request
from unirl.numerics.train.track_replay import TrackReplay

DTYPES = ("float16", "bfloat16")
PER_PROMPT = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="64,128,256,512")
    parser.add_argument("--samples", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    catalog = Catalog.discover()
    heads = ("dtype", "pixels", "elements", "all steps: max", "mean", "first half: max", "mean")
    widths = (9, 7, 9, 15, 8, 16, 8)
    print(" ".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True)))
    for dtype in DTYPES:
        for size in map(int, options.sizes.split(",")):
            track, gap = gap_of(dtype, size, options.samples, catalog)
            half = gap[:, : gap.shape[1] // 2]
            cells = " ".join(
                f"{float(part.max()):{width}.1e} {float(part.mean()):8.1e}" for part, width in ((gap, 15), (half, 16))
            )
            print(f"{dtype:>9} {size:7} {track.latent.final[0].numel():9} {cells}", flush=True)


def gap_of(dtype: str, size: int, samples: int, catalog: Catalog) -> tuple[Track, Tensor]:
    """A track, and [n, S] |log-prob of the rollout - of fp32| at each of its steps."""
    plan, parts = built(dtype, size, catalog)
    _, exact = built(None, size, catalog)
    ((name, sampling),) = plan.only.sampling.items()
    request = build_request(
        read_prompts(Path(plan.data.train))[: samples // PER_PROMPT],
        track=name,
        sampling=sampling,
        samples_per_prompt=PER_PROMPT,
        model=parts.only.model,
        algorithm=parts.only.algorithm,
        seed=plan.run.seed,
        rollout=0,
        policy_version=parts.only.backend.version,
    )
    track = parts.only.engine.generate(request)
    replay = TrackReplay(exact.model, stacked=False, policy_context=lambda policy: nullcontext())
    with torch.no_grad():
        result = replay(track)
    return track, (cast(Tensor, track.latent.log_probs) - result.log_probs).abs()


def built(dtype: str | None, size: int, catalog: Catalog) -> tuple[Plan, Parts]:
    overrides = [f"model.autocast={dtype or 'null'}", f"sampling.height={size}", f"sampling.width={size}"]
    overrides += ["sampling.sde.last=1.0", "sampling.decode=false", "~tracker.report"]
    plan = compose("quickstart", overrides, catalog=catalog)
    return plan, build_parts(plan, catalog=catalog)


if __name__ == "__main__":
    main()
