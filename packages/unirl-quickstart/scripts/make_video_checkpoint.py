"""Makes the video quickstart's checkpoint, a WanPipeline of about 2.4 MB that draws clips of moving shapes.

    python packages/unirl-quickstart/scripts/make_video_checkpoint.py

The VAE is a projection to principal components, in closed form. The text encoder is random: its states tell words
apart, and 64 captions need no more. The transformer sees a whole clip as one token. It learns with the flow-matching
loss, and stops while about four clips in ten are perfect: the others are what RL post-training repairs.
Seeded throughout; the same machine and library versions give the same bytes. About two minutes on one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from checkpoint_files import arguments_given, size_kb, t5_tokenizer, write_in_half, write_prompts
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from torch import Tensor
from training import flow_matching_loss, minimize, parameter_rows, share_rows
from transformers import UMT5Config, UMT5EncoderModel
from unirl.core.roles import ScoreInput
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.rewards.rules.clips_world import ALL_CLIPS, NUM_FRAMES, SIZE_PX, Clip, render_clips
from unirl.rewards.rules.config import MovingShapesConfig
from unirl.rewards.rules.moving_shapes import build as build_reward
from video_vae import CHANNELS, PATCH_PX, build_vae, decode_latents, encode_clips, principal_components

PACKAGE = Path(__file__).resolve().parents[1] / "src/unirl/quickstart/video"
TEXT_LENGTH = 8
"""Tokens of a caption: at most seven words, and the mark of the end."""
TEXT_WIDTH = 32
LATENT_SHAPE = (CHANNELS, NUM_FRAMES, SIZE_PX // PATCH_PX, SIZE_PX // PATCH_PX)
SPREAD = 4.0
"""RMS of normalised latents. It is usually 1; wider, clips stay visible through more of the noise, and the noise that
a token of 128 numbers cannot take away of 1600 is small beside them."""
SHIFT = 5.0
"""Of the schedule: where the noise is as strong as latents that wide."""
EVAL_STEPS = 10
FPS = 16.0
"""At which Wan plays its videos; the reward does not read it."""
FRESH_CLIPS = 8
"""Of each caption, through the VAE and back, for the card."""


# ---------------------------------------------------------------------------------------------- components


def build_text_encoder(vocab_size: int) -> UMT5EncoderModel:
    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=vocab_size,
            d_model=TEXT_WIDTH,
            d_kv=16,
            d_ff=64,
            num_layers=1,
            num_heads=2,
            feed_forward_proj="gated-gelu",
            dropout_rate=0.0,
        )
    )


@torch.no_grad()
def build_transformer(latents: Tensor) -> WanTransformer3DModel:
    """A transformer of which a whole clip is one token. Its way in and its way out begin as the principal components of
    latents [N, 20, 5, 4, 4]."""
    transformer = WanTransformer3DModel(
        patch_size=LATENT_SHAPE[1:],
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        text_dim=TEXT_WIDTH,
        freq_dim=64,
        ffn_dim=448,
        num_layers=1,
        rope_max_seq_len=32,
    )
    way_in, way_out = transformer.patch_embedding, transformer.proj_out
    mean, directions = principal_components(latents.flatten(1), count=way_out.in_features)
    way_in.weight.copy_(directions.unflatten(1, LATENT_SHAPE))
    way_in.bias.copy_(-directions @ mean)
    # The norm before it leaves numbers of RMS 1, of as many as there are directions.
    size = SPREAD * (prod(LATENT_SHAPE) / way_out.in_features) ** 0.5
    # Channels last, as the transformer unpacks a token.
    way_out.weight.copy_(_channels_last(size * directions).T)
    way_out.bias.copy_(_channels_last(-mean[None])[0])
    return transformer


def _channels_last(rows: Tensor) -> Tensor:
    return rows.unflatten(1, LATENT_SHAPE).movedim(1, -1).flatten(1)


def build_pipeline(clips: Tensor) -> tuple[WanPipeline, Tensor]:
    """The pipeline for clips [N, 5, 3, 32, 32], its transformer not trained yet, and their normalised latents."""
    tokenizer = t5_tokenizer(sorted({word for clip in ALL_CLIPS for word in clip.caption.split()}))
    vae = build_vae(clips)
    raw = encode_clips(vae, clips)
    std = raw.pow(2).mean().sqrt().item() / SPREAD
    vae.register_to_config(latents_std=[round(std, 5)] * CHANNELS)
    latents = encode_clips(vae, clips)
    pipeline = WanPipeline(
        transformer=build_transformer(latents),
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT),
        vae=vae,
        text_encoder=build_text_encoder(len(tokenizer)).requires_grad_(False).eval(),
        tokenizer=tokenizer,
    )
    return pipeline, latents


@torch.no_grad()
def embed(pipeline: WanPipeline, clips: Sequence[Clip]) -> Tensor:
    """Embeddings [n, 8, 32] of the captions."""
    captions = sorted({clip.caption for clip in clips})
    embeds, _ = pipeline.encode_prompt(captions, do_classifier_free_guidance=False, max_sequence_length=TEXT_LENGTH)
    return embeds[torch.tensor([captions.index(clip.caption) for clip in clips])]


def velocity(transformer: Any, x: Tensor, sigma: Tensor, *, embeds: Tensor) -> Tensor:
    """Velocity [N, 20, 5, 4, 4] at x and sigma [N]."""
    return transformer(hidden_states=x, timestep=sigma * 1000, encoder_hidden_states=embeds, return_dict=False)[0]


# ------------------------------------------------------------------------------------------------ training


def train_transformer(
    pipeline: WanPipeline,
    latents: Tensor,
    clips: Sequence[Clip],
    *,
    steps: int,
    batch: int,
    learning_rate: float,
    seed: int,
    report: Callable[[int], None],
) -> None:
    """Flow matching on normalised latents [N, 20, 5, 4, 4] of the clips."""
    generator = torch.Generator().manual_seed(seed)
    embeds = embed(pipeline, clips)

    def loss_of(step: int) -> Tensor:
        row = torch.randint(len(latents), (batch,), generator=generator)
        return flow_matching_loss(
            lambda x, sigma: velocity(pipeline.transformer, x, sigma, embeds=embeds[row]),
            latents[row],
            generator=generator,
            shift=SHIFT,
        )

    minimize(
        pipeline.transformer.parameters(),
        loss_of,
        name="transformer",
        steps=steps,
        learning_rate=learning_rate,
        weight_decay=0.01,
        print_every=200,
        report=report,
    )


# ---------------------------------------------------------------------------------------------- evaluation


def sigmas() -> Tensor:
    uniform = torch.linspace(1, 0, EVAL_STEPS + 1)
    return SHIFT * uniform / (1 + (SHIFT - 1) * uniform)


@torch.no_grad()
def sample(pipeline: WanPipeline, clips: Sequence[Clip], *, seed: int) -> Tensor:
    """[N, 5, 3, 32, 32] clips: Euler steps from sigma 1 to 0, no guidance."""
    embeds = embed(pipeline, clips)
    x = torch.randn(len(clips), *LATENT_SHAPE, generator=torch.Generator().manual_seed(seed))
    for sigma, following in pairwise(sigmas()):
        x = x + (following - sigma) * velocity(pipeline.transformer, x, sigma.expand(len(x)), embeds=embeds)
    return decode_latents(pipeline.vae, x)


def score(videos: Tensor, clips: Sequence[Clip]) -> dict[str, float]:
    """Means of the reward `moving-shapes` and of its parts."""
    names = tuple(map(str, range(len(clips))))
    texts = tuple(clip.caption for clip in clips)
    scores = build_reward(MovingShapesConfig(), device="cpu").score(
        ScoreInput(
            sample_ids=names,
            group_ids=names,
            inputs=Inputs.of_texts(texts),
            metadata=tuple(facts(clip) for clip in clips),
            media=Media(kind="video", values=videos, rate=FPS),
        )
    )
    means = {**scores.parts, "reward": scores.values}
    return {name: round(values.mean().item(), 4) for name, values in means.items()}


def measure(pipeline: WanPipeline, clips: Sequence[Clip], *, seed: int, rounds: int) -> dict[str, float]:
    """`score` of `rounds` clips of each caption, from the noise of `seed`."""
    each = [*clips] * rounds
    return score(sample(pipeline, each, seed=seed), each)


def round_trip(vae: AutoencoderKLWan, *, seed: int) -> dict[str, float]:
    """`score` of new clips of each caption, through the VAE and back."""
    generator = torch.Generator().manual_seed(seed)
    fresh = torch.cat([render_clips(clip, count=FRESH_CLIPS, generator=generator) for clip in ALL_CLIPS])
    return score(
        decode_latents(vae, encode_clips(vae, fresh)), [clip for clip in ALL_CLIPS for _ in range(FRESH_CLIPS)]
    )


# ------------------------------------------------------------------------------------------------- writing

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


def facts(clip: Clip) -> dict[str, str]:
    return {"color": clip.color, "shape": clip.shape, "motion": clip.motion}


def prompt_row(clip: Clip) -> dict[str, Any]:
    return {"prompt": clip.caption, "prompt_id": "-".join(facts(clip).values()), "metadata": facts(clip)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=PACKAGE, help="gets the folders `checkpoint` and `prompts`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2000, help="more steps, fewer mistakes")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--clips-per-caption", type=int, default=64, help="drawn of each caption for pre-training")
    parser.add_argument("--captions", choices=["all", "train"], default="all", help="captions of pre-training")
    parser.add_argument("--rounds", type=int, default=12, help="clips for each caption that the card is of")
    # One thread: the order of sums, and so the bytes of the result, would hang on the number of cores.
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    splits = {
        "heldout": [clip for clip in ALL_CLIPS if clip.is_held_out],
        "train": [clip for clip in ALL_CLIPS if not clip.is_held_out],
    }
    generator = torch.Generator().manual_seed(args.seed)
    each = ALL_CLIPS if args.captions == "all" else splits["train"]
    seen = torch.cat([render_clips(clip, count=args.clips_per_caption, generator=generator) for clip in each])
    pipeline, latents = build_pipeline(seen)
    train_transformer(
        pipeline,
        latents,
        [clip for clip in each for _ in range(args.clips_per_caption)],
        steps=args.steps,
        batch=args.batch,
        learning_rate=args.learning_rate,
        seed=args.seed,
        report=lambda step: print(step, measure(pipeline, splits["heldout"], seed=1, rounds=12), flush=True),
    )
    folder = args.out / "checkpoint"
    reloaded = write_in_half(pipeline, folder)
    write_prompts(args.out / "prompts", {split: map(prompt_row, clips) for split, clips in splits.items()})
    measure_seed = args.seed + 1000
    shares = {split: measure(reloaded, splits[split], seed=measure_seed, rounds=args.rounds) for split in splits}
    card = CARD.format(
        kilobytes=size_kb(folder),
        arguments=arguments_given(args, parser),
        torch=torch.__version__.split("+")[0],
        diffusers=diffusers.__version__,
        transformers=transformers.__version__,
        channels=CHANNELS,
        steps=args.steps,
        batch=args.batch,
        captions="all 64 captions" if args.captions == "all" else "the 48 captions of `train.jsonl`",
        parameters=parameter_rows(reloaded.components),
        shift=SHIFT,
        rounds=args.rounds,
        measure_seed=measure_seed,
        fresh=FRESH_CLIPS * len(ALL_CLIPS),
        shares=share_rows({**shares, "round trip": round_trip(reloaded.vae, seed=measure_seed)}),
    )
    (folder / "README.md").write_text(card)
    print(card)


if __name__ == "__main__":
    main()
