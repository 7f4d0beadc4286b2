"""Makes the image-to-video quickstart's checkpoint, a WanImageToVideoPipeline of about 2.4 MB, and first frames.

    python packages/unirl-quickstart/scripts/make_i2v_checkpoint.py

All but the transformer is made as for the video quickstart, on clips that start in the middle. The transformer gets the
first frame behind the noise, as in Wan. It learns from careless captions, of which one in five says another direction,
so that a third of its clips go astray: those are what RL post-training repairs.
Seeded throughout; the same machine and library versions give the same bytes. About two minutes on one core.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoint_files import picture, to_levels, write_in_half, write_prompts
from diffusers import AutoencoderKLWan, WanImageToVideoPipeline
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
from unirl.rewards.rules.clips_world import ALL_CLIPS, MOTIONS, NUM_FRAMES, Clip, render_onward_clips
from unirl.rewards.rules.shapes_world import COLORS, SHAPES
from video_vae import encode_clips

PACKAGE = Path(__file__).resolve().parents[1] / "src/unirl/quickstart/i2v"
FRAMES = {"train": range(2), "heldout": range(2, 5)}
"""Numbers of the first frames of each colour and shape. Every clip of a split starts from each of them."""

Case = tuple[Clip, int, Tensor]
"""A clip, and the number of its first frame and its levels [3, 32, 32]."""


def caption(clip: Clip) -> str:
    """The direction alone: colour and shape are in the first frame."""
    return f"move {MOTIONS[clip.motion]}"


# ----------------------------------------------------------------------------------------- frames, pipeline


def draw_cases(*, seed: int) -> dict[str, list[Case]]:
    """`heldout`, 16 clips from 3 frames each, and `train`, 48 clips from 2 others."""
    generator = torch.Generator().manual_seed(seed)
    count = max(map(max, FRAMES.values())) + 1
    # Where a clip goes does not show in its first frame.
    frames = {
        (clip.color, clip.shape): to_levels(render_onward_clips(clip, count=count, generator=generator)[:, 0])
        for clip in (Clip(color=color, shape=shape, motion="left") for color in COLORS for shape in SHAPES)
    }
    return {
        split: [(clip, number, frames[clip.color, clip.shape][number]) for clip in clips for number in FRAMES[split]]
        for split, clips in splits().items()
    }


def source_of(vae: AutoencoderKLWan, levels: Tensor) -> Tensor:
    """[N, 21, 5, 4, 4] condition of first frames [N, 3, 32, 32]: the mask of given frames, and normalised latents of
    the frame with grey ones behind it."""
    videos = torch.full((len(levels), NUM_FRAMES, *levels.shape[1:]), 0.5)
    videos[:, 0] = levels / 255
    latents = encode_clips(vae, videos)
    mask = torch.zeros_like(latents[:, :1])
    mask[:, :, 0] = 1
    return torch.cat([mask, latents], dim=1)


def build_pipeline(clips: Tensor) -> tuple[WanImageToVideoPipeline, Tensor, Tensor]:
    """The pipeline for clips [N, 5, 3, 32, 32], its transformer not trained yet, their normalised latents, and the
    conditions of their first frames."""
    levels = to_levels(clips[:, 0])
    parts, latents = components(
        clips, map(caption, ALL_CLIPS), head_dim=28, ffn_dim=128, condition=lambda vae: source_of(vae, levels)
    )
    return WanImageToVideoPipeline(**parts), latents, source_of(parts["vae"], levels)


def careless_captions(clips: Sequence[Clip], *, wrong: float, generator: torch.Generator) -> list[str]:
    """A caption of each clip, of which a share `wrong` says one of the other directions."""
    motions = list(MOTIONS)
    is_wrong = torch.rand(len(clips), generator=generator) < wrong
    others = torch.randint(1, len(motions), (len(clips),), generator=generator)
    turns = torch.where(is_wrong, others, 0).tolist()
    told = [
        motions[(motions.index(clip.motion) + turn) % len(motions)] for clip, turn in zip(clips, turns, strict=True)
    ]
    return [caption(dataclasses.replace(clip, motion=motion)) for clip, motion in zip(clips, told, strict=True)]


# ---------------------------------------------------------------------------------------------- evaluation


def sample_cases(pipeline: WanImageToVideoPipeline, cases: Sequence[Case], *, seed: int) -> Tensor:
    """[N, 5, 3, 32, 32] clips."""
    source = source_of(pipeline.vae, torch.stack([levels for *_, levels in cases]))
    return sample(pipeline, embed(pipeline, [caption(clip) for clip, *_ in cases]), source, seed=seed)


def measure(pipeline: WanImageToVideoPipeline, cases: Sequence[Case], *, seed: int, rounds: int) -> dict[str, float]:
    """`score` of `rounds` clips of each case, from the noise of `seed`."""
    each = [*cases] * rounds
    return score(sample_cases(pipeline, each, seed=seed), [clip for clip, *_ in each])


def swapped(cases: Sequence[Case]) -> list[Case]:
    """Each case with a first frame of another colour and another shape."""
    colors, shapes = list(COLORS), list(SHAPES)

    def other(clip: Clip) -> tuple[str, str]:
        color, shape = colors.index(clip.color), shapes.index(clip.shape)
        return colors[(color + 1) % len(colors)], shapes[(shape + 1) % len(shapes)]

    frames = {(clip.color, clip.shape, number): levels for clip, number, levels in cases}
    return [(clip, number, frames[*other(clip), number]) for clip, number, _ in cases]


# ------------------------------------------------------------------------------------------------- writing

CARD = """# Tiny Wan that moves the shape of an image

A `WanImageToVideoPipeline` of {kilobytes} kB. From an image of a coloured shape and the text "move to the left", "move
to the right", "move up" or "move down" it makes a clip of 5 frames of 32 x 32 pixels. A share of {wrong:g} of its
captions in training said another direction, so that there is something to learn. It knows no other words.

Made by

    python packages/unirl-quickstart/scripts/make_i2v_checkpoint.py{arguments}

with torch {torch}, diffusers {diffusers}, transformers {transformers}. The VAE projects patches of 8 x 8 pixels of
each frame to their first {channels} principal components, and back; it does not compress time. The text encoder is
random. The transformer, of which a whole clip is one token, gets {channels} channels of noise, one of the mask of given
frames, and {channels} of the first frame with grey ones behind it. It saw {steps:,} batches of {batch} clips of
{captions}.

| | parameters |
| --- | --- |
{parameters}

Use 8 text tokens (`max_sequence_length=8`), 10 steps with the checkpoint's shift of {shift:g}, and no guidance. So
sampled with Euler steps, {rounds} clips for each prompt with noise seed {measure_seed} have these means of the reward
`moving-shapes` and of its parts: frames of the right colour, frames of the right shape, steps in the right direction,
and clips right in all of them ("perfect"). "Swapped" are the held-out prompts with first frames of another colour and
shape; the last row is of {fresh} new clips that go through the VAE and back.

| prompts | color | shape | motion | perfect | reward |
| --- | --- | --- | --- | --- | --- |
{shares}
"""


def prompt_row(case: Case) -> dict[str, Any]:
    clip, number, _ = case
    return {
        "prompt": caption(clip),
        "prompt_id": f"{clip.color}-{clip.shape}-{clip.motion}-{number}",
        "media": [{"modality": "image", "role": "source", "uri": f"images/{clip.color}-{clip.shape}-{number}.png"}],
        "metadata": facts(clip),
    }


def write_cases(folder: Path, of_split: dict[str, list[Case]]) -> None:
    """The prompt files, and the first frames beside them."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for case in (case for cases in of_split.values() for case in cases):
        picture(case[2]).save(folder / prompt_row(case)["media"][0]["uri"])
    write_prompts(folder, {split: map(prompt_row, cases) for split, cases in of_split.items()})


def main() -> None:
    parser = argument_parser(__doc__.splitlines()[0], out=PACKAGE, steps=4000, rounds=12)
    parser.add_argument("--wrong", type=float, default=0.2, help="share of pre-training captions of another direction")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    of_split = draw_cases(seed=args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    clips = ALL_CLIPS if args.captions == "all" else splits()["train"]
    seen = torch.cat([render_onward_clips(clip, count=args.clips_per_caption, generator=generator) for clip in clips])
    pipeline, latents, source = build_pipeline(seen)
    each = [clip for clip in clips for _ in range(args.clips_per_caption)]
    train_transformer(
        pipeline.transformer,
        latents,
        embed(pipeline, careless_captions(each, wrong=args.wrong, generator=generator)),
        source,
        args=args,
        report=lambda step: print(step, measure(pipeline, of_split["heldout"], seed=1, rounds=8), flush=True),
    )
    folder = args.out / "checkpoint"
    reloaded = write_in_half(pipeline, folder)
    write_cases(args.out / "prompts", of_split)
    measure_seed = args.seed + 1000
    cases = {**of_split, "swapped": swapped(of_split["heldout"])}
    shares = {name: measure(reloaded, cases[name], seed=measure_seed, rounds=args.rounds) for name in cases}
    shares["round trip"] = round_trip(reloaded.vae, render_onward_clips, seed=measure_seed)
    card = CARD.format(
        **card_values(reloaded, folder, args=args, parser=parser, shares=shares),
        wrong=args.wrong,
        captions="all 64 combinations" if args.captions == "all" else "the 48 combinations of `train.jsonl`",
        measure_seed=measure_seed,
    )
    (folder / "README.md").write_text(card)
    print(card)


if __name__ == "__main__":
    main()
