"""Makes the quickstart's checkpoint: a StableDiffusion3Pipeline of about 3 MB that paints coloured shapes.

    python packages/unirl-quickstart/scripts/make_checkpoint.py

Trains a VAE on rendered shapes, then transformer and text encoders together with the flow-matching loss,
and stops while roughly half of the samples are still wrong: that half is what RL post-training repairs.
Seeded throughout; the same machine and library versions give the same bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
import transformers
from checkpoint_files import arguments_given, clip_tokenizer, size_kb, t5_tokenizer, write_prompts
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from torch import Tensor
from training import flow_matching_loss, minimize, parameter_rows, share_rows, train_vae
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)
from unirl.rewards.rules.shapes_reading import read_shapes
from unirl.rewards.rules.shapes_world import ALL_SCENES, COLORS, PLACES, SHAPES, Scene, render

PACKAGE = Path(__file__).resolve().parents[1] / "src/unirl/quickstart"
CLIP_LENGTH = T5_LENGTH = 8
"""Tokens of a caption: six words, and the marks at its ends."""
LATENT_CHANNELS, LATENT_SIZE = 4, 8
EVAL_STEPS = 10


# ---------------------------------------------------------------------------------------------- components


def build_vae() -> AutoencoderKL:
    return AutoencoderKL(
        sample_size=64,
        block_out_channels=(8, 8, 32, 32),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def build_transformer() -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=LATENT_SIZE,
        patch_size=2,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=64,
        caption_projection_dim=64,
        pooled_projection_dim=64,
        pos_embed_max_size=64,
        qk_norm="rms_norm",
    )


def build_pipeline() -> StableDiffusion3Pipeline:
    words = sorted({word for scene in ALL_SCENES for word in scene.caption.split()})
    clip, t5 = clip_tokenizer(words, max_length=CLIP_LENGTH), t5_tokenizer(words)
    clip_config = CLIPTextConfig(
        vocab_size=len(clip),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=77,
        projection_dim=32,
        bos_token_id=clip.bos_token_id,
        eos_token_id=clip.eos_token_id,
        pad_token_id=clip.pad_token_id,
    )
    t5_config = T5Config(
        vocab_size=len(t5),
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=1,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
    )
    return StableDiffusion3Pipeline(
        transformer=build_transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=build_vae(),
        text_encoder=CLIPTextModelWithProjection(clip_config),
        tokenizer=clip,
        text_encoder_2=CLIPTextModelWithProjection(clip_config),
        tokenizer_2=clip,
        text_encoder_3=T5EncoderModel(t5_config),
        tokenizer_3=t5,
    )


# ------------------------------------------------------------------------------------------------ training


@torch.no_grad()
def encode_images(vae: AutoencoderKL, images: Tensor) -> Tensor:
    return torch.cat([vae.encode(2 * chunk - 1).latent_dist.mean for chunk in images.split(32)])


def normalize(vae: AutoencoderKL, latents: Tensor) -> Tensor:
    """Latents of about unit variance, as the denoiser takes them."""
    return (latents - vae.config["shift_factor"]) * vae.config["scaling_factor"]


@torch.no_grad()
def decode_latents(vae: AutoencoderKL, latents: Tensor) -> Tensor:
    latents = latents / vae.config["scaling_factor"] + vae.config["shift_factor"]
    return torch.cat([(vae.decode(chunk).sample / 2 + 0.5).clamp(0, 1) for chunk in latents.split(32)])


def train_denoiser(
    pipeline: StableDiffusion3Pipeline,
    latents: Tensor,
    scene_of: Tensor,
    *,
    captions: list[str],
    steps: int,
    batch: int,
    learning_rate: float,
    seed: int,
    report: Callable[[int], None],
) -> None:
    """Flow matching on normalised latents, transformer and text encoders together.

    latents: [N, C, h, w].  scene_of: [N] index into captions.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = [
        tokenize(tokenizer, captions, length=CLIP_LENGTH) for tokenizer in (pipeline.tokenizer, pipeline.tokenizer_2)
    ]
    # Two paddings, so that the denoiser does not hang on the number of padding tokens.
    t5_tokens = [tokenize(pipeline.tokenizer_3, captions, length=T5_LENGTH * k) for k in (1, 2)]
    encoders = (pipeline.text_encoder, pipeline.text_encoder_2, pipeline.text_encoder_3)

    def loss_of(step: int) -> Tensor:
        prompt, pooled = encode_tokens(pipeline, tokens, t5_tokens[step % 2])
        index = torch.randint(len(latents), (batch,), generator=generator)
        clean, scene = latents[index], scene_of[index]

        def velocity(x: Tensor, sigma: Tensor) -> Tensor:
            return pipeline.transformer(
                x,
                encoder_hidden_states=prompt[scene],
                pooled_projections=pooled[scene],
                timestep=sigma * 1000,
                return_dict=False,
            )[0]

        return flow_matching_loss(velocity, clean, generator=generator)

    minimize(
        [p for part in (pipeline.transformer, *encoders) for p in part.parameters()],
        loss_of,
        name="denoiser",
        steps=steps,
        learning_rate=learning_rate,
        weight_decay=0.01,
        print_every=200,
        report=report,
    )


def tokenize(tokenizer: CLIPTokenizer | T5Tokenizer, captions: list[str], *, length: int) -> Tensor:
    return tokenizer(captions, padding="max_length", max_length=length, return_tensors="pt").input_ids


def encode_tokens(
    pipeline: StableDiffusion3Pipeline, clip_tokens: list[Tensor], t5_tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs of `StableDiffusion3Pipeline.encode_prompt`, with gradient."""
    pooled, hidden = [], []
    encoders = (pipeline.text_encoder, pipeline.text_encoder_2)
    for encoder, tokens in zip(encoders, clip_tokens, strict=True):
        output = encoder(tokens, output_hidden_states=True)
        pooled.append(output.text_embeds)
        hidden.append(output.hidden_states[-2])
    t5 = pipeline.text_encoder_3(t5_tokens).last_hidden_state
    clip = torch.cat(hidden, dim=-1)
    clip = F.pad(clip, (0, t5.shape[-1] - clip.shape[-1]))
    return torch.cat([clip, t5], dim=1), torch.cat(pooled, dim=-1)


# ---------------------------------------------------------------------------------------------- evaluation


@torch.no_grad()
def sample(pipeline: StableDiffusion3Pipeline, scenes: list[Scene], *, seed: int) -> Tensor:
    """[N, 3, 64, 64] images of the scenes: Euler steps from sigma 1 to 0, no guidance."""
    captions = sorted({scene.caption for scene in scenes})
    prompt, _, pooled, _ = pipeline.encode_prompt(
        captions, captions, captions, do_classifier_free_guidance=False, max_sequence_length=T5_LENGTH
    )
    row = torch.tensor([captions.index(scene.caption) for scene in scenes])
    prompt, pooled = prompt[row], pooled[row]
    shape = (len(scenes), LATENT_CHANNELS, LATENT_SIZE, LATENT_SIZE)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    for sigma, following in pairwise(torch.linspace(1, 0, EVAL_STEPS + 1)):
        velocity = pipeline.transformer(
            latents,
            encoder_hidden_states=prompt,
            pooled_projections=pooled,
            timestep=sigma.expand(len(scenes)) * 1000,
            return_dict=False,
        )[0]
        latents = latents + (following - sigma) * velocity
    return decode_latents(pipeline.vae, latents)


def share_right(images: Tensor, scenes: list[Scene]) -> dict[str, float]:
    """Shares of images with the right colour, shape and place, and with all three ("perfect")."""
    reading = read_shapes(images)
    color = reading.color == torch.tensor([list(COLORS).index(scene.color) for scene in scenes])
    shape = reading.shape == torch.tensor([SHAPES.index(scene.shape) for scene in scenes])
    place = reading.place == torch.tensor([list(PLACES).index(scene.place) for scene in scenes])
    shares = {"color": color, "shape": shape, "place": place, "perfect": color & shape & place}
    return {name: round(hits.float().mean().item(), 4) for name, hits in shares.items()}


def measure(pipeline: StableDiffusion3Pipeline, *, seed: int, rounds: int) -> dict[str, dict[str, float]]:
    """Shares of right samples on the captions of each split, 48 samples a round, from the noise of `seed`."""
    held_out = [scene for scene in ALL_SCENES if scene.is_held_out] * (3 * rounds)
    train = [scene for scene in ALL_SCENES if not scene.is_held_out] * rounds
    return {
        "heldout": share_right(sample(pipeline, held_out, seed=seed), held_out),
        "train": share_right(sample(pipeline, train, seed=seed + 1), train),
    }


# ------------------------------------------------------------------------------------------------- writing

CARD = """# Tiny Stable Diffusion 3 of coloured shapes

A `StableDiffusion3Pipeline` of {kilobytes} kB that paints what its 64 captions say: one of four shapes in one of four
colours at one of four places, 64 x 64 pixels. It is trained to be right about half of the time, so that there is
something to learn. It knows no other words.

Made by

    python packages/unirl-quickstart/scripts/make_checkpoint.py{arguments}

with torch {torch}, diffusers {diffusers}, transformers {transformers}.
The VAE saw shapes of all 64 captions; denoiser and text encoders, trained together, saw {scenes_seen}.

| | parameters |
| --- | --- |
{parameters}

Use 8 text tokens for T5 (`max_sequence_length=8`), 10 steps with sigmas 1, 0.9 ... 0.1, 0, and no guidance.
So sampled, {count} images of each split with noise seed {measure_seed} have these shares of right colour, right shape,
right place, and all three ("perfect"):

| captions | color | shape | place | perfect |
| --- | --- | --- | --- | --- |
{shares}

Images that go through the VAE and back, {reconstructed} of them freshly drawn, are still perfect: {reconstruction}.

It knows the padding that it was trained with: CLIP's 8 tokens, as its tokenizers say, and T5's 8 or 16. With other
lengths, as in an engine that always pads CLIP to 77, it runs, but paints badly.
"""


def prompt_row(scene: Scene) -> dict[str, Any]:
    facts = {"color": scene.color, "shape": scene.shape, "place": scene.place}
    return {"prompt": scene.caption, "prompt_id": "-".join(facts.values()), "metadata": facts}


def write_checkpoint(pipeline: StableDiffusion3Pipeline, folder: Path) -> StableDiffusion3Pipeline:
    """Save in half precision where diffusers reads it back as fp32; returns the pipeline as it is read back.

    The text encoders stay in fp32: transformers would keep half precision on loading.
    """
    pipeline.transformer.half()
    pipeline.vae.half()
    pipeline.save_pretrained(folder)
    return StableDiffusion3Pipeline.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def write_card(pipeline: StableDiffusion3Pipeline, folder: Path, *, seed: int, arguments: str, scenes: str) -> None:
    rounds, measure_seed = 12, seed + 1000
    generator = torch.Generator().manual_seed(measure_seed)
    fresh = torch.cat([render(scene, count=8, generator=generator) for scene in ALL_SCENES])
    latents = normalize(pipeline.vae, encode_images(pipeline.vae, fresh))
    again = share_right(decode_latents(pipeline.vae, latents), [s for s in ALL_SCENES for _ in range(8)])
    shares = measure(pipeline, seed=measure_seed, rounds=rounds)
    card = CARD.format(
        kilobytes=size_kb(folder),
        arguments=arguments,
        torch=torch.__version__.split("+")[0],
        diffusers=diffusers.__version__,
        transformers=transformers.__version__,
        scenes_seen="all of them too" if scenes == "all" else "only the 48 of `train.jsonl`",
        parameters=parameter_rows(pipeline.components),
        count=48 * rounds,
        measure_seed=measure_seed,
        shares=share_rows(shares),
        reconstructed=len(fresh),
        reconstruction=f"{again['perfect']:.3f}",
    )
    (folder / "README.md").write_text(card)
    print(card)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=PACKAGE, help="gets the folders `checkpoint` and `prompts`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vae-steps", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=1400, help="denoiser steps; more steps, fewer mistakes")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--images-per-scene", type=int, default=80)
    parser.add_argument("--scenes", choices=["all", "train"], default="train", help="captions of the denoiser")
    # One thread: the order of sums, and so the bytes of the result, would hang on the number of cores.
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    pipeline = build_pipeline()
    generator = torch.Generator().manual_seed(args.seed)
    images = torch.cat([render(s, count=args.images_per_scene, generator=generator) for s in ALL_SCENES])
    scene_of = torch.arange(len(ALL_SCENES)).repeat_interleave(args.images_per_scene)
    train_vae(pipeline.vae, images, steps=args.vae_steps, batch=16, seed=args.seed)

    latents = encode_images(pipeline.vae, images)
    pipeline.vae.register_to_config(
        shift_factor=round(latents.mean().item(), 4), scaling_factor=round(1 / latents.std().item(), 4)
    )
    latents = normalize(pipeline.vae, latents)
    if args.scenes == "train":
        is_seen = torch.tensor([not scene.is_held_out for scene in ALL_SCENES])[scene_of]
        latents, scene_of = latents[is_seen], scene_of[is_seen]
    train_denoiser(
        pipeline,
        latents,
        scene_of,
        captions=[scene.caption for scene in ALL_SCENES],
        steps=args.steps,
        batch=args.batch,
        learning_rate=args.learning_rate,
        seed=args.seed,
        report=lambda step: print(step, measure(pipeline, seed=1, rounds=2), flush=True),
    )
    folder = args.out / "checkpoint"
    reloaded = write_checkpoint(pipeline, folder)
    rows = {
        split: [prompt_row(scene) for scene in ALL_SCENES if scene.is_held_out is held_out]
        for split, held_out in (("train", False), ("heldout", True))
    }
    write_prompts(args.out / "prompts", rows)
    write_card(reloaded, folder, seed=args.seed, arguments=arguments_given(args, parser), scenes=args.scenes)


if __name__ == "__main__":
    main()
