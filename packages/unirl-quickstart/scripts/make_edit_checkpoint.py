"""Makes the editing quickstart's checkpoint, a Flux2KleinPipeline of about 2 MB that edits coloured shapes, and images.

    python packages/unirl-quickstart/scripts/make_edit_checkpoint.py

The VAE is that of the first quickstart. The text encoder is random: its states tell words apart, and 44 instructions
need no more. The transformer learns from images before and after an edit, with the flow-matching loss, and stops while
about half of its edits are still wrong: that half is what RL post-training repairs.
Seeded throughout; the same machine and library versions give the same bytes. About two minutes on one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
import transformers
from checkpoint_files import arguments_given, picture, size_kb, write_in_half, write_prompts
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
)
from edit_images import IMAGES_PER_SCENE, Case, draw_all, draw_splits, is_seen
from tiny_qwen3 import SPECIAL, build_tokenizer
from torch import Tensor
from training import flow_matching_loss, minimize, parameter_rows, share_rows
from transformers import Qwen3Config, Qwen3ForCausalLM
from unirl.core.roles import ScoreInput
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.numerics.media import LoadedImage
from unirl.quickstart import checkpoint_path
from unirl.rewards.rules.config import EditConfig
from unirl.rewards.rules.edit import build as build_reward
from unirl.rewards.rules.edits_world import ALL_EDITS, Edit
from unirl.rewards.rules.shapes_world import ALL_SCENES, Scene

PACKAGE = Path(__file__).resolve().parents[1] / "src/unirl/quickstart/edit"
TEXT_LENGTH = 8
"""Tokens of an instruction: at most six words between the marks of start and end."""
TEXT_LAYERS, TEXT_WIDTH = (9, 18, 27), 32
LATENT_CHANNELS, LATENT_SIZE = 16, 4
"""Patches of 2 x 2 of the VAE's 4 x 8 x 8."""
SOURCE_TIME = 10
"""Time position that the pipeline gives to the first source image; the image itself is at 0."""
EVAL_STEPS = 10
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"


# ---------------------------------------------------------------------------------------------- components


def edit_tokenizer() -> Any:
    words = sorted({word for edit in ALL_EDITS for word in edit.instruction.split()})
    first = [word for word in words if word in ("make", "move", "turn")]
    rest = [f" {word}" for word in words if word not in first]
    return build_tokenizer([*rest, *first], special=SPECIAL, chat_template=TEMPLATE)


def build_text_encoder(vocab_size: int) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocab_size,
            hidden_size=TEXT_WIDTH,
            intermediate_size=TEXT_WIDTH,
            num_hidden_layers=TEXT_LAYERS[-1] + 1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            # Wider than usual, so that a token's state depends on those before it and not on itself alone.
            initializer_range=0.2,
            eos_token_id=None,
            pad_token_id=None,
            bos_token_id=None,
        )
    )


def build_vae() -> AutoencoderKLFlux2:
    """The VAE of the first quickstart, in the class that has statistics of its latents' patches."""
    source = AutoencoderKL.from_pretrained(checkpoint_path() / "vae", local_files_only=True, trust_remote_code=False)
    same = ("block_out_channels", "down_block_types", "up_block_types", "latent_channels", "layers_per_block")
    same += ("norm_num_groups", "sample_size", "use_quant_conv", "use_post_quant_conv")
    vae = AutoencoderKLFlux2(**{name: source.config[name] for name in same})
    left_out = vae.load_state_dict(source.state_dict(), strict=False)
    assert not left_out.unexpected_keys and all(name.startswith("bn.") for name in left_out.missing_keys)
    return vae


def build_transformer() -> Flux2Transformer2DModel:
    return Flux2Transformer2DModel(
        in_channels=LATENT_CHANNELS,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=len(TEXT_LAYERS) * TEXT_WIDTH,
        timestep_guidance_channels=64,
        mlp_ratio=2.0,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )


def build_pipeline() -> Flux2KleinPipeline:
    tokenizer = edit_tokenizer()
    pipeline = Flux2KleinPipeline(
        transformer=build_transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=build_vae(),
        text_encoder=build_text_encoder(len(tokenizer)),
        tokenizer=tokenizer,
    )
    for part in (pipeline.text_encoder, pipeline.vae):
        part.requires_grad_(False).eval()
    return pipeline


# ------------------------------------------------------------------------------------- latents, conditions


@torch.no_grad()
def encode_raw(vae: Any, images: Tensor) -> Tensor:
    """[N, 16, 4, 4] patches of the VAE's latents of images in [0, 1], not normalised."""
    chunks = [vae.encode(2 * chunk - 1).latent_dist.mode() for chunk in images.split(32)]
    return F.pixel_unshuffle(torch.cat(chunks), 2)


def statistics(vae: Any) -> tuple[Tensor, Tensor]:
    variance = vae.bn.running_var + vae.config.batch_norm_eps
    return vae.bn.running_mean.view(1, -1, 1, 1), variance.sqrt().view(1, -1, 1, 1)


def encode_images(vae: Any, images: Tensor) -> Tensor:
    mean, std = statistics(vae)
    return (encode_raw(vae, images) - mean) / std


@torch.no_grad()
def decode_latents(vae: Any, latents: Tensor) -> Tensor:
    mean, std = statistics(vae)
    chunks = F.pixel_shuffle(latents * std + mean, 2).split(32)
    return torch.cat([(vae.decode(chunk).sample / 2 + 0.5).clamp(0, 1) for chunk in chunks])


@torch.no_grad()
def embed(pipeline: Flux2KleinPipeline, texts: Sequence[str]) -> dict[str, Tensor]:
    """Embeddings [8, 96] of each text."""
    distinct = sorted(set(texts))
    embeds, _ = pipeline.encode_prompt(
        distinct, max_sequence_length=TEXT_LENGTH, text_encoder_out_layers=TEXT_LAYERS, num_images_per_prompt=1
    )
    return dict(zip(distinct, embeds, strict=True))


def velocity(transformer: Any, x: Tensor, sigma: Tensor, *, embeds: Tensor, source: Tensor) -> Tensor:
    """Velocity [N, 16, 4, 4] at x and sigma [N], with the source's latents as further tokens."""

    def positions(time: int) -> Tensor:
        side = torch.arange(LATENT_SIZE)
        return torch.cartesian_prod(torch.tensor([time]), side, side, torch.arange(1))

    one = torch.arange(1)
    output = transformer(
        hidden_states=torch.cat([x, source], dim=-2).flatten(2).transpose(1, 2),
        timestep=sigma,
        guidance=None,
        encoder_hidden_states=embeds,
        txt_ids=torch.cartesian_prod(one, one, one, torch.arange(embeds.shape[1])),
        img_ids=torch.cat([positions(0), positions(SOURCE_TIME)]),
        return_dict=False,
    )[0]
    return output[:, : x[0, 0].numel()].transpose(1, 2).reshape(x.shape)


# ------------------------------------------------------------------------------------------------ training


def train_transformer(
    pipeline: Flux2KleinPipeline,
    latents: Tensor,
    *,
    edits: Sequence[Edit],
    steps: int,
    batch: int,
    learning_rate: float,
    seed: int,
    report: Callable[[int], None],
) -> None:
    """Flow matching on normalised latents.  latents: [64, n, 16, 4, 4], as `draw_all` draws the images."""
    generator = torch.Generator().manual_seed(seed)
    number_of = {scene: number for number, scene in enumerate(ALL_SCENES)}
    before, after = (torch.tensor([number_of[scene] for scene in scenes]) for scenes in _scenes(edits))
    embeds_of = embed(pipeline, [edit.instruction for edit in edits])
    embeds = torch.stack([embeds_of[edit.instruction] for edit in edits])

    def loss_of(step: int) -> Tensor:
        row = torch.randint(len(edits), (batch,), generator=generator)
        number = torch.randint(latents.shape[1], (batch,), generator=generator)
        source, clean = latents[before[row], number], latents[after[row], number]
        return flow_matching_loss(
            lambda x, sigma: velocity(pipeline.transformer, x, sigma, embeds=embeds[row], source=source),
            clean,
            generator=generator,
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


def _scenes(edits: Sequence[Edit]) -> tuple[list[Scene], list[Scene]]:
    return [edit.source for edit in edits], [edit.target for edit in edits]


# ---------------------------------------------------------------------------------------------- evaluation


@torch.no_grad()
def edit_images(pipeline: Flux2KleinPipeline, cases: Sequence[Case], *, seed: int) -> Tensor:
    """[N, 3, 64, 64] edited images: Euler steps from sigma 1 to 0, no guidance."""
    embeds_of = embed(pipeline, [edit.instruction for edit, _ in cases])
    embeds = torch.stack([embeds_of[edit.instruction] for edit, _ in cases])
    source = encode_images(pipeline.vae, torch.stack([levels for _, levels in cases]) / 255)
    x = torch.randn(source.shape, generator=torch.Generator().manual_seed(seed))
    for sigma, following in pairwise(torch.linspace(1, 0, EVAL_STEPS + 1)):
        at = sigma.expand(len(x))
        x = x + (following - sigma) * velocity(pipeline.transformer, x, at, embeds=embeds, source=source)
    return decode_latents(pipeline.vae, x)


def score(images: Tensor, cases: Sequence[Case]) -> dict[str, float]:
    """Means of the reward `edit` and of its parts."""
    names = tuple(map(str, range(len(cases))))
    texts = tuple(edit.instruction for edit, _ in cases)
    sources = tuple((LoadedImage.of(levels / 255, role="source"),) for _, levels in cases)
    scores = build_reward(EditConfig(), device="cpu").score(
        ScoreInput(
            sample_ids=names,
            group_ids=names,
            inputs=Inputs(ids=names, prompts=texts, texts=texts, media=sources),
            metadata=tuple({"attribute": edit.attribute, "value": edit.value} for edit, _ in cases),
            media=Media(kind="image", values=images),
        )
    )
    means = {**scores.parts, "reward": scores.values}
    return {name: round(values.mean().item(), 4) for name, values in means.items()}


def measure(pipeline: Flux2KleinPipeline, cases: Sequence[Case], *, seed: int, rounds: int = 1) -> dict[str, float]:
    """`score` of `rounds` edits of each case, from the noise of `seed`."""
    each = [*cases] * rounds
    return score(edit_images(pipeline, each, seed=seed), each)


# ------------------------------------------------------------------------------------------------- writing

CARD = """# Tiny FLUX.2 [klein] that edits shapes

A `Flux2KleinPipeline` of {kilobytes} kB that edits a 64 x 64 px image of a coloured shape: "make the ring red", "turn
the ring into a square", "move the ring to the left". It is trained to be right about half of the time, so that there
is something to learn. It knows no other words.

Made by

    python packages/unirl-quickstart/scripts/make_edit_checkpoint.py{arguments}

with torch {torch}, diffusers {diffusers}, transformers {transformers}. The VAE is that of the first quickstart, with
statistics of its latents; the text encoder is random. The transformer saw {steps:,} batches of {batch} pairs of images,
before and after one of the {edits} edits of `train.jsonl`, in which no held-out scene occurs.

| | parameters |
| --- | --- |
{parameters}

Use 8 text tokens (`max_sequence_length=8`), 10 steps with sigmas 1, 0.9 ... 0.1, 0, and no guidance. So sampled,
{rounds} images for each prompt with noise seed {measure_seed} have these means of the reward `edit` and of its parts:

| prompts | asked | kept | background | perfect | reward |
| --- | --- | --- | --- | --- | --- |
{shares}
"""


def prompt_row(edit: Edit, number: int) -> dict[str, Any]:
    scene = edit.source
    name = f"{scene.color}-{scene.shape}-{scene.place}-{number}"
    return {
        "prompt": edit.instruction,
        "prompt_id": f"{name}-{edit.attribute}-{edit.value}",
        "media": [{"modality": "image", "role": "source", "uri": f"images/{name}.png"}],
        "metadata": {"attribute": edit.attribute, "value": edit.value},
    }


def write_images(folder: Path, splits: dict[str, list[Case]]) -> None:
    """The prompt files, and the images beside them."""
    rows: dict[str, list[dict[str, Any]]] = {}
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for split, cases in splits.items():
        rows[split] = []
        for number, (edit, levels) in enumerate(cases):
            # The number of edits of a scene is a multiple of the number of its images.
            rows[split].append(prompt_row(edit, number % IMAGES_PER_SCENE[split]))
            picture(levels).save(folder / rows[split][-1]["media"][0]["uri"])
    write_prompts(folder, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=PACKAGE, help="gets the folders `checkpoint` and `prompts`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1500, help="more steps, fewer mistakes")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--images-per-scene", type=int, default=64, help="drawn of each scene for pre-training")
    parser.add_argument("--rounds", type=int, default=4, help="images for each prompt that the card is of")
    # One thread: the order of sums, and so the bytes of the result, would hang on the number of cores.
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    splits = draw_splits(seed=args.seed)
    pipeline = build_pipeline()
    images = draw_all(count=args.images_per_scene, generator=torch.Generator().manual_seed(args.seed))
    raw = encode_raw(pipeline.vae, images.flatten(0, 1))
    pipeline.vae.bn.running_mean.copy_(raw.mean(dim=(0, 2, 3)))
    pipeline.vae.bn.running_var.copy_(raw.var(dim=(0, 2, 3)))
    mean, std = statistics(pipeline.vae)
    edits = [edit for edit in ALL_EDITS if is_seen(edit)]
    train_transformer(
        pipeline,
        ((raw - mean) / std).unflatten(0, images.shape[:2]),
        edits=edits,
        steps=args.steps,
        batch=args.batch,
        learning_rate=args.learning_rate,
        seed=args.seed,
        report=lambda step: print(step, measure(pipeline, splits["heldout"], seed=1), flush=True),
    )
    folder = args.out / "checkpoint"
    reloaded = write_in_half(pipeline, folder)
    write_images(args.out / "prompts", splits)
    measure_seed = args.seed + 1000
    shares = {split: measure(reloaded, splits[split], seed=measure_seed, rounds=args.rounds) for split in splits}
    card = CARD.format(
        kilobytes=size_kb(folder),
        arguments=arguments_given(args, parser),
        torch=torch.__version__.split("+")[0],
        diffusers=diffusers.__version__,
        transformers=transformers.__version__,
        steps=args.steps,
        batch=args.batch,
        edits=len(edits),
        parameters=parameter_rows(reloaded.components),
        rounds=args.rounds,
        measure_seed=measure_seed,
        shares=share_rows({split: shares[split] for split in ("heldout", "train")}),
    )
    (folder / "README.md").write_text(card)
    print(card)


if __name__ == "__main__":
    main()
