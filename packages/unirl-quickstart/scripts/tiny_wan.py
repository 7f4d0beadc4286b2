"""A miniature Wan of which a whole clip is one token: its components, pre-training, sampling and score."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from checkpoint_files import arguments_given, size_kb, t5_tokenizer
from diffusers import UniPCMultistepScheduler, WanTransformer3DModel
from torch import Tensor
from training import flow_matching_loss, minimize, parameter_rows, share_rows
from transformers import UMT5Config, UMT5EncoderModel
from unirl.core.roles import ScoreInput
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.rewards.rules.clips_world import ALL_CLIPS, NUM_FRAMES, SIZE_PX, Clip
from unirl.rewards.rules.config import MovingShapesConfig
from unirl.rewards.rules.moving_shapes import build as build_reward
from video_vae import CHANNELS, PATCH_PX, build_vae, decode_latents, encode_clips, principal_components

__all__ = [
    "LATENT_SHAPE",
    "argument_parser",
    "card_values",
    "components",
    "embed",
    "facts",
    "round_trip",
    "sample",
    "score",
    "sigmas",
    "splits",
    "train_transformer",
    "velocity",
]

TEXT_LENGTH = 8
"""Tokens of a caption: at most seven words, and the mark of the end."""
TEXT_WIDTH = 32
LATENT_SHAPE = (CHANNELS, NUM_FRAMES, SIZE_PX // PATCH_PX, SIZE_PX // PATCH_PX)
SPREAD = 4.0
"""RMS of normalised latents. It is usually 1; wider, clips stay visible through more of the noise, and the noise that
a token of 128 numbers cannot take away of 1600 is small beside them."""
SHIFT = 5.0
"""Shift of the schedule, to where the noise is as strong as latents that wide."""
EVAL_STEPS = 10
FPS = 16.0
"""Frame rate of Wan's videos; the reward does not read it."""
FRESH_CLIPS = 8
"""Clips of each kind, through the VAE and back, for the card."""

RenderClips = Callable[..., Tensor]
"""`render_clips` or one that is called alike."""


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


def components(
    clips: Tensor,
    captions: Iterable[str],
    *,
    head_dim: int,
    ffn_dim: int,
    condition: Callable[[Any], Tensor] | None = None,
) -> tuple[dict[str, Any], Tensor]:
    """Components of a pipeline for clips [N, 5, 3, 32, 32], by name, the transformer not trained yet, and the clips'
    normalised latents.  condition: given the VAE, the condition of each clip; see `build_transformer`."""
    tokenizer = t5_tokenizer(sorted({word for caption in captions for word in caption.split()}))
    vae = build_vae(clips)
    std = encode_clips(vae, clips).pow(2).mean().sqrt().item() / SPREAD
    vae.register_to_config(latents_std=[round(std, 5)] * CHANNELS)
    latents = encode_clips(vae, clips)
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT)
    source = condition(vae) if condition else None
    parts = {
        "transformer": build_transformer(latents, head_dim=head_dim, ffn_dim=ffn_dim, source=source),
        "scheduler": scheduler,
        "vae": vae,
        "text_encoder": build_text_encoder(len(tokenizer)).requires_grad_(False).eval(),
        "tokenizer": tokenizer,
    }
    return parts, latents


@torch.no_grad()
def build_transformer(latents: Tensor, *, head_dim: int, ffn_dim: int, source: Tensor | None = None) -> Any:
    """A transformer of which a whole clip is one token. Its way in and its way out begin as the principal components of
    latents [N, 20, 5, 4, 4].

    source: [N, C, 5, 4, 4], a condition behind the noise. Its principal components fill half of the token.
    """
    transformer = WanTransformer3DModel(
        patch_size=LATENT_SHAPE[1:],
        num_attention_heads=4,
        attention_head_dim=head_dim,
        in_channels=CHANNELS + (0 if source is None else source.shape[1]),
        out_channels=CHANNELS,
        text_dim=TEXT_WIDTH,
        freq_dim=64,
        ffn_dim=ffn_dim,
        num_layers=1,
        rope_max_seq_len=32,
    )
    way_in, way_out = transformer.patch_embedding, transformer.proj_out
    mean, directions = principal_components(latents.flatten(1), count=way_out.in_features)
    way_in.weight.zero_()
    way_in.weight[:, :CHANNELS] = directions.unflatten(1, LATENT_SHAPE)
    way_in.bias.copy_(-directions @ mean)
    # The norm before it leaves numbers of RMS 1, of as many as there are directions.
    size = SPREAD * (prod(LATENT_SHAPE) / way_out.in_features) ** 0.5
    # Channels last, as the transformer unpacks a token.
    way_out.weight.copy_(_channels_last(size * directions).T)
    way_out.bias.copy_(_channels_last(-mean[None])[0])
    if source is not None:
        _let_in(source, way_in)
    return transformer


def _let_in(source: Tensor, way_in: Any) -> None:
    half = way_in.out_channels // 2
    mean, directions = principal_components(source.flatten(1), count=half)
    way_in.weight[half:] = 0
    way_in.weight[half:, CHANNELS:] = directions.unflatten(1, source.shape[1:])
    way_in.bias[half:] = -directions @ mean
    # An input that is the same for all clips does no more than the bias, but Adam moves its weight as much as any:
    # thousands of them, such as the latents of grey frames, would swamp the others.
    noise_and_varying = torch.cat([torch.ones(LATENT_SHAPE), (source != source[0]).any(dim=0).float()])
    way_in.weight.register_hook(lambda gradient: gradient * noise_and_varying)


def _channels_last(rows: Tensor) -> Tensor:
    return rows.unflatten(1, LATENT_SHAPE).movedim(1, -1).flatten(1)


@torch.no_grad()
def embed(pipeline: Any, captions: Sequence[str]) -> Tensor:
    """Embeddings [n, 8, 32] of the captions."""
    distinct = sorted(set(captions))
    embeds, _ = pipeline.encode_prompt(distinct, do_classifier_free_guidance=False, max_sequence_length=TEXT_LENGTH)
    return embeds[torch.tensor([distinct.index(caption) for caption in captions])]


def velocity(transformer: Any, x: Tensor, sigma: Tensor, *, embeds: Tensor, source: Tensor | None = None) -> Tensor:
    """Velocity [N, 20, 5, 4, 4] at x and sigma [N].  source: [N, C, 5, 4, 4], a condition behind the noise."""
    hidden = x if source is None else torch.cat([x, source], dim=1)
    return transformer(hidden_states=hidden, timestep=sigma * 1000, encoder_hidden_states=embeds, return_dict=False)[0]


# ------------------------------------------------------------------------------------------------ training


def train_transformer(
    transformer: Any,
    latents: Tensor,
    embeds: Tensor,
    source: Tensor | None = None,
    *,
    args: argparse.Namespace,
    report: Callable[[int], None],
) -> None:
    """Flow matching on normalised latents [N, 20, 5, 4, 4], with the embeddings and the condition of each.

    args: of `argument_parser`.
    """
    generator = torch.Generator().manual_seed(args.seed)

    def loss_of(step: int) -> Tensor:
        row = torch.randint(len(latents), (args.batch,), generator=generator)
        given = None if source is None else source[row]
        return flow_matching_loss(
            lambda x, sigma: velocity(transformer, x, sigma, embeds=embeds[row], source=given),
            latents[row],
            generator=generator,
            shift=SHIFT,
        )

    minimize(
        transformer.parameters(),
        loss_of,
        name="transformer",
        steps=args.steps,
        learning_rate=args.learning_rate,
        weight_decay=0.01,
        print_every=200,
        report=report,
    )


# ---------------------------------------------------------------------------------------------- evaluation


def sigmas() -> Tensor:
    uniform = torch.linspace(1, 0, EVAL_STEPS + 1)
    return SHIFT * uniform / (1 + (SHIFT - 1) * uniform)


@torch.no_grad()
def sample(pipeline: Any, embeds: Tensor, source: Tensor | None = None, *, seed: int) -> Tensor:
    """[N, 5, 3, 32, 32] clips: Euler steps from sigma 1 to 0, no guidance."""
    x = torch.randn(len(embeds), *LATENT_SHAPE, generator=torch.Generator().manual_seed(seed))
    for sigma, following in pairwise(sigmas()):
        at = sigma.expand(len(x))
        x = x + (following - sigma) * velocity(pipeline.transformer, x, at, embeds=embeds, source=source)
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


def round_trip(vae: Any, render: RenderClips, *, seed: int) -> dict[str, float]:
    """`score` of new clips of each kind, through the VAE and back."""
    generator = torch.Generator().manual_seed(seed)
    fresh = torch.cat([render(clip, count=FRESH_CLIPS, generator=generator) for clip in ALL_CLIPS])
    return score(
        decode_latents(vae, encode_clips(vae, fresh)), [clip for clip in ALL_CLIPS for _ in range(FRESH_CLIPS)]
    )


# ------------------------------------------------------------------------------------------------- writing


def facts(clip: Clip) -> dict[str, str]:
    return {"color": clip.color, "shape": clip.shape, "motion": clip.motion}


def splits() -> dict[str, list[Clip]]:
    return {
        "heldout": [clip for clip in ALL_CLIPS if clip.is_held_out],
        "train": [clip for clip in ALL_CLIPS if not clip.is_held_out],
    }


def argument_parser(description: str, *, out: Path, steps: int, rounds: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=out, help="gets the folders `checkpoint` and `prompts`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=steps, help="more steps, fewer mistakes")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--clips-per-caption", type=int, default=64, help="drawn of each caption for pre-training")
    parser.add_argument("--captions", choices=["all", "train"], default="all", help="captions of pre-training")
    parser.add_argument("--rounds", type=int, default=rounds, help="clips for each prompt that the card is of")
    # One thread: the order of sums, and so the bytes of the result, would hang on the number of cores.
    parser.add_argument("--threads", type=int, default=1)
    return parser


def card_values(
    pipeline: Any,
    folder: Path,
    *,
    args: argparse.Namespace,
    parser: argparse.ArgumentParser,
    shares: dict[str, dict[str, float]],
) -> dict[str, Any]:
    """Values in every card, by the names of its template."""
    return {
        "kilobytes": size_kb(folder),
        "arguments": arguments_given(args, parser),
        "torch": torch.__version__.split("+")[0],
        "diffusers": diffusers.__version__,
        "transformers": transformers.__version__,
        "channels": CHANNELS,
        "steps": args.steps,
        "batch": args.batch,
        "parameters": parameter_rows(pipeline.components),
        "shift": SHIFT,
        "rounds": args.rounds,
        "fresh": FRESH_CLIPS * len(ALL_CLIPS),
        "shares": share_rows(shares),
    }
