"""Makes the image-token quickstart's checkpoint: a Janus of about 2 MB that draws shapes with 16 tokens.

    python packages/unirl-quickstart/scripts/make_image_tokens_checkpoint.py

A VQ model learns to write each image of the first quickstart's world as 4 x 4 tokens. A language model learns to draw
captions with these tokens, first from right drawings, then from those of a draughtsman who draws rings for nearly
every shape. So it draws well, and often the wrong shape.
Seeded throughout; the same machine and library versions give the same bytes. About five minutes on one core.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from checkpoint_files import arguments_given, size_kb
from make_checkpoint import share_right
from make_writer_checkpoint import words_of
from shapes_vq import draw_scenes, pixels_of, tokens_of, train_vq
from tiny_qwen3 import build_tokenizer
from torch import Tensor, nn
from training import minimize, share_rows
from transformers import JanusForConditionalGeneration
from transformers.utils import logging as transformers_logging
from unirl.core.types.data import Prompt
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import TextSamplingConfig
from unirl.loop.requests import build_request
from unirl.models.janus.config import JanusConfig
from unirl.models.janus.model import JanusModel, build
from unirl.models.janus.tiny import SPECIAL, config_of, tokenizer_of, write_processor
from unirl.numerics.tokens.batches import pad_batch
from unirl.numerics.tokens.rollout import generate_text
from unirl.rewards.rules.shapes_world import ALL_SCENES, COLORS, PLACES, SHAPES, Scene

PACKAGE = Path(__file__).resolve().parents[1] / "src/unirl/quickstart/image_tokens"
FACTS = {"color": (slice(2, 3), tuple(COLORS)), "shape": (slice(3, 4), SHAPES), "place": (slice(4, 7), tuple(PLACES))}
"""Tokens of a prompt that say each fact, behind what begins a sequence and "a", and its values."""
GRID = 4
"""Tokens per side; one stands for 16 x 16 pixels."""
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 64,
    # transformers takes the grid of image tokens from here.
    "patch_size": 64 // GRID,
    "mlp_ratio": 1.0,
    "depth": 1,
}
CODEBOOK: dict[str, Any] = {
    "embed_dim": 8,
    "num_embeddings": 256,
    "latent_channels": 32,
    "num_patches": GRID,
    "base_channels": 32,
    "channel_multiplier": [1] * 5,
    "num_res_blocks": 0,
}


# ------------------------------------------------------------------------------------------------- model


def build_model(tokenizer: Any) -> JanusForConditionalGeneration:
    """Random weights, those of the language model of the scale that keeps the variance of their inputs."""
    model = JanusForConditionalGeneration(config_of(tokenizer, text=TEXT, vision=VISION, codebook=CODEBOOK))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
    for head in (model.lm_head, model.model.generation_head.vision_head):
        nn.init.normal_(head.weight, std=0.02)
    return model


def sampling_of(guidance: float) -> TextSamplingConfig:
    return TextSamplingConfig(chat=False, max_new_tokens=GRID**2, options={"guidance_scale": guidance})


def drawn_instead(scene: Scene, *, rings: float, generator: random.Random) -> Scene:
    """The scene that the draughtsman draws for the caption of another.

    rings: probability of a ring, whatever the shape. No other mistake is made: a shape that nothing is mistaken for is
    not unlearnt at the place and in the colour of a held-out caption.
    """
    return replace(scene, shape="ring") if generator.random() < rings else scene


def pretrain(model: JanusModel, drawings: Tensor, *, args: argparse.Namespace, report: Callable[[int], None]) -> None:
    """Cross-entropy of image tokens behind captions of training scenes, and behind padding for the guidance: of right
    drawings, and in the last steps of the draughtsman's.

    drawings: [64, n, 16] tokens of drawings of each scene.
    """
    author = random.Random(args.seed)
    scenes = [scene for scene in ALL_SCENES if not scene.is_held_out]
    captions = tuple(scene.caption for scene in scenes)
    inputs = Inputs(ids=captions, prompts=captions, texts=captions, media=((),) * len(captions))
    prompts = model.prompt_tokens(inputs, sampling=sampling_of(1.0))

    def row(rings: float) -> tuple[Tensor, Tensor]:
        number = author.randrange(len(scenes))
        scene, prompt = scenes[number], prompts[number].clone()
        for fact, (places, known) in FACTS.items():
            if author.random() < args.dropped:
                # Each word is to mean the same beside all others.
                prompt[places] = model.pad_token
                scene = replace(scene, **{fact: author.choice(known)})
        drawn = ALL_SCENES.index(drawn_instead(scene, rings=rings, generator=author))
        if author.random() < args.unconditional:
            # All but what begins the sequence and the image, as guidance has it.
            prompt[1:-1] = model.pad_token
        return prompt, drawings[drawn, author.randrange(drawings.shape[1])]

    def loss_of(step: int) -> Tensor:
        rings = args.rings if step >= args.steps - args.careless_steps else 0.0
        shown, tokens = zip(*(row(rings) for _ in range(args.batch)), strict=True)
        batch = replace(pad_batch(shown, tokens, pad_token=model.pad_token), options={"guidance_scale": 1.0})
        return -model.score(batch, temperature=1.0)[0].mean()

    minimize(
        [parameter for parameter in model.trainable.parameters() if parameter.requires_grad],
        loss_of,
        name="language model",
        steps=args.steps,
        learning_rate=args.learning_rate,
        weight_decay=0.01,
        print_every=100,
        report=report,
    )


# --------------------------------------------------------------------------------------------- evaluation


@torch.no_grad()
def measure(model: JanusModel, scenes: Sequence[Scene], *, count: int, guidance: float, seed: int) -> dict[str, float]:
    """Shares of `count` sampled images of each scene with the right colour, shape and place, and all three."""
    sampling = sampling_of(guidance)
    request = build_request(
        [Prompt(prompt_id=scene.caption, text=scene.caption, metadata={}) for scene in scenes],
        track="image",
        medium="image",
        sampling=sampling,
        samples_per_prompt=count,
        model=model,
        trajectory="none",
        seed=seed,
        rollout=0,
        policy_version=0,
    )
    media = model.media_of(generate_text(model, request.text).tokens, sampling=sampling)
    return share_right(torch.as_tensor(media.values) / 255, [scene for scene in scenes for _ in range(count)])


def measure_splits(model: JanusModel, *, images: int, guidance: float, seed: int) -> dict[str, dict[str, float]]:
    """Shares of `images` images of each split, see `measure`."""
    result: dict[str, dict[str, float]] = {}
    for split in ("heldout", "train"):
        scenes = [scene for scene in ALL_SCENES if scene.is_held_out is (split == "heldout")]
        result[split] = measure(model, scenes, count=max(1, images // len(scenes)), guidance=guidance, seed=seed)
    return result


# ------------------------------------------------------------------------------------------------- writing

CARD = """# Tiny Janus of coloured shapes

A `JanusForConditionalGeneration` of {kilobytes} kB, {parameters:,} parameters, {trained:,} of which train. It draws one
of four shapes in one of four colours at one of four places, 64 x 64 pixels, with 4 x 4 tokens of a codebook of {codes}.
It knows the 64 captions of the first quickstart and no other words. It can neither write nor see: its vision tower is
random, and so is the output layer of its texts.

Made by

    python packages/unirl-quickstart/scripts/make_image_tokens_checkpoint.py{arguments}

with torch {torch}, transformers {transformers}. The VQ model saw shapes of all 64 captions, with {jitter} of the range
of sizes and positions of that world, each where four tokens meet. Of {reconstructed} new images that go through it and
back, a share of {reconstruction:.3f} is still perfect. The language model saw the 48 captions of `train.jsonl`: first
with right drawings, and in the last {careless_steps} of {steps} steps with a ring, whatever the shape, in a share of
{rings}. In a share of {dropped} of all drawings padding was in place of the colour, and so of shape and place, which
were then any; in one of {unconditional} it was in place of the whole caption, for guidance.

Shares of images, {count} of each split, sampled at temperature 1, with the right colour, shape and place, and all three
("perfect"):

| captions | guidance scale | color | shape | place | perfect |
| --- | --- | --- | --- | --- | --- |
{shares}
"""


def write_card(folder: Path, *, args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    model = build(JanusConfig(path=str(folder), decode_batch=64), device="cpu")
    janus: Any = model.trainable
    generator = torch.Generator().manual_seed(args.seed + 1000)
    count = max(1, args.measured // len(ALL_SCENES))
    fresh = draw_scenes(ALL_SCENES, count=count, jitter=args.jitter, generator=generator)
    vq = janus.model.vqmodel
    again = share_right(pixels_of(vq, tokens_of(vq, fresh)), [scene for scene in ALL_SCENES for _ in range(count)])
    rows = {
        f"{split} | {guidance:g}": row
        for guidance in (1.0, args.guidance)
        for split, row in measure_splits(model, images=args.measured, guidance=guidance, seed=args.seed + 1000).items()
    }
    card = CARD.format(
        kilobytes=size_kb(folder),
        parameters=sum(parameter.numel() for parameter in janus.parameters()),
        trained=sum(parameter.numel() for parameter in janus.parameters() if parameter.requires_grad),
        codes=CODEBOOK["num_embeddings"],
        arguments=arguments_given(args, parser),
        torch=torch.__version__.split("+")[0],
        transformers=transformers.__version__,
        jitter=args.jitter,
        reconstructed=len(fresh),
        reconstruction=again["perfect"],
        rings=args.rings,
        dropped=args.dropped,
        steps=args.steps,
        careless_steps=args.careless_steps,
        unconditional=args.unconditional,
        count=args.measured,
        shares=share_rows(rows),
    )
    (folder / "README.md").write_text(card)
    print(card)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=PACKAGE, help="gets the folder `checkpoint`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vq-steps", type=int, default=600, help="steps of the VQ model")
    parser.add_argument("--vq-batch", type=int, default=8)
    parser.add_argument("--jitter", type=float, default=0.2, help="share of the world's range of sizes and positions")
    parser.add_argument("--images-per-scene", type=int, default=32)
    parser.add_argument("--steps", type=int, default=800, help="steps of the language model")
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--careless-steps", type=int, default=300, help="the last of these, on careless drawings")
    parser.add_argument("--dropped", type=float, default=0.25, help="how often padding is in place of a fact")
    parser.add_argument("--rings", type=float, default=0.9, help="share of these that are rings, whatever the shape")
    parser.add_argument("--unconditional", type=float, default=0.1, help="share of drawings without a caption")
    parser.add_argument("--guidance", type=float, default=2.0, help="scale of the card's guided images")
    parser.add_argument("--measured", type=int, default=256, help="images of a row of the card")
    # One thread: the order of sums, and so the bytes of the result, would hang on the number of cores.
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    transformers_logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = tokenizer_of(
        build_tokenizer(words_of(scene.caption for scene in ALL_SCENES), special=SPECIAL).backend_tokenizer
    )
    model: Any = build_model(tokenizer)
    vq = model.model.vqmodel
    generator = torch.Generator().manual_seed(args.seed)
    images = draw_scenes(ALL_SCENES, count=args.images_per_scene, jitter=args.jitter, generator=generator)
    train_vq(vq, images, steps=args.vq_steps, batch=args.vq_batch, seed=args.seed)
    drawings = tokens_of(vq, images).view(len(ALL_SCENES), args.images_per_scene, GRID**2)
    # The start of the tokens' own embeddings: like codes look alike.
    model.model.generation_embeddings.weight.data.copy_(vq.quantize.embedding.weight * CODEBOOK["embed_dim"] ** 0.5)
    folder = args.out / "checkpoint"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_processor(folder, size_px=VISION["image_size"])

    policy = build(JanusConfig(path=str(folder), decode_batch=64), device="cpu")
    pretrain(
        policy,
        drawings,
        args=args,
        report=lambda step: print(step, measure_splits(policy, images=192, guidance=args.guidance, seed=1), flush=True),
    )
    trained: Any = policy.trainable
    trained.half().save_pretrained(folder)
    write_card(folder, args=args, parser=parser)


if __name__ == "__main__":
    main()
