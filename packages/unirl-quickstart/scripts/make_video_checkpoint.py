"""Makes the video quickstart's checkpoint, a WanPipeline of about 2.4 MB that draws clips of moving shapes.

    python packages/unirl-quickstart/scripts/make_video_checkpoint.py

The VAE is a projection to principal components, in closed form. The text encoder is random: its states tell words
apart, and 64 captions need no more. The transformer sees a whole clip as one token. It learns with the flow-matching
loss, and stops while about four clips in ten are perfect: the others are what RL post-training repairs.
Seeded throughout; the same machine and library versions give the same bytes. About two minutes on one core.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoint_files import write_in_half, write_prompts
from diffusers import WanPipeline
from tiny_wan import (
    argument_parser,
    card_values,
    components,
    embed,
    facts,
    round_trip,
    sample,
    score,
    splits,
    train_transformer,
)
from torch import Tensor
from unirl.rewards.rules.clips_world import ALL_CLIPS, Clip, render_clips

PACKAGE = Path(__file__).resolve().parents[1] / "src/unirl/quickstart/video"


def build_pipeline(clips: Tensor) -> tuple[WanPipeline, Tensor]:
    """The pipeline for clips [N, 5, 3, 32, 32], its transformer not trained yet, and their normalised latents."""
    parts, latents = components(clips, captions_of(ALL_CLIPS), head_dim=32, ffn_dim=448)
    return WanPipeline(**parts), latents


def captions_of(clips: Sequence[Clip]) -> list[str]:
    return [clip.caption for clip in clips]


def measure(pipeline: WanPipeline, clips: Sequence[Clip], *, seed: int, rounds: int) -> dict[str, float]:
    """`score` of `rounds` clips of each caption, from the noise of `seed`."""
    each = [*clips] * rounds
    return score(sample(pipeline, embed(pipeline, captions_of(each)), seed=seed), each)


CARD = """# Tiny Wan of moving shapes

A `WanPipeline` of {kilobytes} kB that draws clips of 5 frames of 32 x 32 pixels: "a red ring moves to the left", one of
four shapes in one of four colours in one of four directions. Its training stopped while about four clips in ten were
perfect, so that there is something to learn. It knows no other words.

Made by

    python packages/unirl-quickstart/scripts/make_video_checkpoint.py{arguments}

with torch {torch}, diffusers {diffusers}, transformers {transformers}. The VAE projects patches of 8 x 8 pixels of
each frame to their first {channels} principal components, and back; it does not compress time. The text encoder is
random. The transformer, of which a whole clip is one token, saw {steps:,} batches of {batch} clips of
{captions}.

| | parameters |
| --- | --- |
{parameters}

Use 8 text tokens (`max_sequence_length=8`), 10 steps with the checkpoint's shift of {shift:g}, and no guidance. So
sampled with Euler steps, {rounds} clips for each caption with noise seed {measure_seed} have these means of the reward
`moving-shapes` and of its parts: frames of the right colour, frames of the right shape, steps in the right direction,
and clips right in all of them ("perfect"). The last row is of {fresh} new clips that go through the VAE and back.

| captions | color | shape | motion | perfect | reward |
| --- | --- | --- | --- | --- | --- |
{shares}
"""


def prompt_row(clip: Clip) -> dict[str, Any]:
    return {"prompt": clip.caption, "prompt_id": "-".join(facts(clip).values()), "metadata": facts(clip)}


def main() -> None:
    parser = argument_parser(__doc__.splitlines()[0], out=PACKAGE, steps=2000, rounds=12)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    of_split = splits()
    generator = torch.Generator().manual_seed(args.seed)
    clips = ALL_CLIPS if args.captions == "all" else of_split["train"]
    seen = torch.cat([render_clips(clip, count=args.clips_per_caption, generator=generator) for clip in clips])
    pipeline, latents = build_pipeline(seen)
    train_transformer(
        pipeline.transformer,
        latents,
        embed(pipeline, captions_of([clip for clip in clips for _ in range(args.clips_per_caption)])),
        args=args,
        report=lambda step: print(step, measure(pipeline, of_split["heldout"], seed=1, rounds=12), flush=True),
    )
    folder = args.out / "checkpoint"
    reloaded = write_in_half(pipeline, folder)
    write_prompts(args.out / "prompts", {split: map(prompt_row, clips) for split, clips in of_split.items()})
    measure_seed = args.seed + 1000
    shares = {split: measure(reloaded, of_split[split], seed=measure_seed, rounds=args.rounds) for split in of_split}
    shares["round trip"] = round_trip(reloaded.vae, render_clips, seed=measure_seed)
    card = CARD.format(
        **card_values(reloaded, folder, args=args, parser=parser, shares=shares),
        captions="all 64 captions" if args.captions == "all" else "the 48 captions of `train.jsonl`",
        measure_seed=measure_seed,
    )
    (folder / "README.md").write_text(card)
    print(card)


if __name__ == "__main__":
    main()
