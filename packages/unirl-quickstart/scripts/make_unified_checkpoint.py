"""Makes the unified quickstarts' checkpoint: a BAGEL of about 2 MB that writes plans of shapes, draws and criticises.

    python packages/unirl-quickstart/scripts/make_unified_checkpoint.py

It knows the clumsy captions of the enhancer quickstart: for each it writes notes ("red ring left") or a caption, at
times with facts mixed up; behind notes, the caption that they say; and it draws captions, half right. So one model has
two things to learn from its images alone: to plan by captions, and to draw them.
It knows the captions of the first quickstart as well: it draws them at once, says what is wrong with a drawing, at
times of another one, and draws again: the same if the drawing was right.
The VAE is that of the first quickstart, which is trained on for a few steps. Seeded throughout; the same machine and
library versions give the same bytes. About a quarter of an hour on one core.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import diffusers
import torch
import transformers
from checkpoint_files import arguments_given, picture, size_kb, to_levels
from diffusers import AutoencoderKL
from make_checkpoint import share_right
from make_writer_checkpoint import FACTS, MIXED_UP, Clumsy, draw_splits, words_of
from safetensors.torch import save_file
from tiny_qwen3 import SPECIAL, build_tokenizer
from torch import Tensor, nn
from training import flow_matching_loss, minimize, train_vae
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs, Turn
from unirl.core.types.sampling import LatentSamplingConfig, TextSamplingConfig
from unirl.models.bagel.checkpoint import CONFIG, LANGUAGE, VAE, VISION, WEIGHTS, Sizes
from unirl.models.bagel.config import BagelConfig
from unirl.models.bagel.model import BagelModel, build
from unirl.models.bagel.module import Bagel
from unirl.models.bagel.vae import new_vae, published_name
from unirl.models.bagel.vision import Vision, vision_config
from unirl.numerics.tokens.batches import pad_batch
from unirl.quickstart import checkpoint_path
from unirl.rewards.rules.shapes_world import ALL_SCENES, SHAPES, Scene, render

PACKAGE = Path(__file__).resolve().parents[1] / "src/unirl/quickstart/unified"
MARKS = ("<|vision_start|>", "<|vision_end|>")
CHANNELS, PATCH, LATENT_SIDE = 4, 2, 4
"""Images of 64 x 64 pixels are 4 x 4 tokens of 2 x 2 latents."""
LANGUAGE_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "model_type": "qwen2",
}
VISION_SIZES: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    # One more than the checkpoint has.
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
DRAWN = LatentSamplingConfig(num_inference_steps=10, height=64, width=64)
DRAWN.schedule.shift = 1.0
WRITTEN = TextSamplingConfig()


# ---------------------------------------------------------------------------------------------- components


def build_vae(painter: AutoencoderKL) -> AutoencoderKL:
    """An autoencoder with the settings that BAGEL's has, from the painter's weights; its latents have unit variance
    under those settings as well."""
    result = new_vae(painter.config["block_out_channels"], layers=1, channels=CHANNELS)
    result.load_state_dict(painter.state_dict())
    # (z - shift) * factor of both are to be equal.
    factor = painter.config["scaling_factor"] / result.config["scaling_factor"]
    shift = result.config["shift_factor"] - painter.config["shift_factor"] * factor
    with torch.no_grad():
        last, first = result.encoder.conv_out, result.decoder.conv_in
        last.weight[:CHANNELS] *= factor
        last.bias[:CHANNELS] = last.bias[:CHANNELS] * factor + shift
        first.weight /= factor
        first.bias -= shift * first.weight.sum(dim=(1, 2, 3))
    return result


def sizes(vocab: int) -> Sizes:
    return Sizes(
        vocab=vocab,
        width=LANGUAGE_SIZES["hidden_size"],
        inner=LANGUAGE_SIZES["intermediate_size"],
        layers=LANGUAGE_SIZES["num_hidden_layers"],
        heads=LANGUAGE_SIZES["num_attention_heads"],
        kv_heads=LANGUAGE_SIZES["num_key_value_heads"],
        eps=LANGUAGE_SIZES["rms_norm_eps"],
        rope_theta=LANGUAGE_SIZES["rope_theta"],
        latent=CHANNELS * PATCH**2,
        latent_side=LATENT_SIDE,
        vision=VISION_SIZES["hidden_size"],
        vision_side=VISION_SIZES["image_size"] // VISION_SIZES["patch_size"],
        connector_act="gelu_pytorch_tanh",
    )


def places_table(side: int, width: int) -> Tensor:
    """[side^2, width]: sines and cosines of the column, then of the row, as in the published checkpoint."""
    steps = torch.arange(width // 4) / (width // 4)
    angles = torch.arange(side)[:, None] / 10_000**steps
    waves = torch.cat([angles.sin(), angles.cos()], dim=1)
    return torch.cat([waves.repeat(side, 1), waves.repeat_interleave(side, dim=0)], dim=1)


def start_weights(model: Bagel) -> None:
    """Random, but that queries of latents start as their keys: a token attends to its like, which in a drawing that is
    shown is the one at the same place."""
    for name, parameter in model.named_parameters():
        if "pos_embed" in name:
            parameter.data = places_table(int(len(parameter) ** 0.5), parameter.shape[1])
        elif parameter.ndim > 1:
            is_table = "embed_tokens" in name or "lm_head" in name
            nn.init.normal_(parameter, std=0.02 if is_table else parameter.shape[1] ** -0.5)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    nn.init.zeros_(model.llm2vae.weight)
    own = dict(model.named_parameters())
    heads, kv_heads = LANGUAGE_SIZES["num_attention_heads"], LANGUAGE_SIZES["num_key_value_heads"]
    for name, parameter in own.items():
        if name.endswith("q_proj_moe_gen.weight"):
            keys = own[name.replace("q_proj", "k_proj")].data.unflatten(0, (kv_heads, -1))
            parameter.data = keys.repeat_interleave(heads // kv_heads, dim=0).flatten(0, 1)


def write_start(folder: Path, tokenizer: Any, vae: AutoencoderKL) -> None:
    """A checkpoint in the published layout, whose transformer and ViT know nothing yet."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "model_type": "bagel",
        "vae_config": {"z_channels": CHANNELS, "downsample": 8},
        "latent_patch_size": PATCH,
        "max_latent_size": LATENT_SIDE,
        "connector_act": "gelu_pytorch_tanh",
    }
    language = {"vocab_size": len(tokenizer), **LANGUAGE_SIZES}
    for name, values in ((CONFIG, settings), (LANGUAGE, language), (VISION, VISION_SIZES)):
        (folder / name).write_text(json.dumps(values, indent=2) + "\n")
    tokenizer.save_pretrained(folder)
    write_vae(folder, vae)


def write_vae(folder: Path, vae: AutoencoderKL) -> None:
    """In half precision, which `vae` has from here on."""
    stored = {}
    for name, tensor in vae.half().state_dict().items():
        is_attention = ".attentions." in name and tensor.ndim == 2
        value = tensor[:, :, None, None] if is_attention else tensor
        stored[published_name(name, levels=len(vae.config["block_out_channels"]))] = value.contiguous()
    save_file(stored, folder / VAE, metadata={"format": "pt"})


def write_weights(folder: Path, parts: Sequence[nn.Module], *, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for part in parts for name, tensor in part.state_dict().items()}
    save_file(tensors, folder / f"{WEIGHTS}.safetensors", metadata={"format": "pt"})


# ------------------------------------------------------------------------------------------------- corpus


@dataclass(frozen=True)
class Example:
    """A context and its target: a text, or a drawing as [16, 4, 4] latents."""

    prompt: str
    turns: tuple[Turn, ...]
    target: str | Tensor


class Author:
    """Writes the corpus.

    Plans, of clumsy captions: notes or a caption; behind notes, the caption; behind a caption, the same again; behind
    one or both, the drawing.
    Revisions, of plain captions: a drawing at once; behind it, a critique of it; behind both, a drawing again, the
    same one if it was right and the critique says so.
    """

    def __init__(
        self, model: BagelModel, *, drawings: Drawings, corpus: Sequence[Clumsy], args: argparse.Namespace
    ) -> None:
        self._model, self._drawings, self._corpus, self._args = model, drawings, corpus, args
        self._random = random.Random(args.seed)
        self._scenes = sorted({prompt.scene for prompt in corpus}, key=lambda scene: scene.caption)

    def text(self) -> Example:
        if self._random.random() < self._args.revisions:
            scene, shown, draft = self._draft()
            return Example(scene.caption, (draft.turn,), self._critique(scene, shown))
        prompt = self._random.choice(self._corpus)
        texts = self._plan(prompt)[0]
        cut = self._random.randrange(len(texts) + 1)
        return Example(prompt.prompt, self._turns(texts[:cut]), (*texts, texts[-1])[cut])

    def drawing(self) -> Example:
        """A drawing of a training scene; held-out scenes are never drawn."""
        if self._random.random() < self._args.revisions:
            scene, shown, draft = self._draft()
            critique = self._critique(scene, shown)
            if self._random.random() < 0.3:
                return Example(scene.caption, (), self._drawing(scene))
            is_kept = shown == scene and critique == "right"
            target = draft.latents if is_kept else self._drawing(scene)
            return Example(scene.caption, (draft.turn, *self._turns([critique])), target)
        while True:
            prompt = self._random.choice(self._corpus)
            texts, scene = self._plan(prompt)
            if not scene.is_held_out:
                again = texts[-1:] if self._random.random() < 0.2 else []
                return Example(prompt.prompt, self._turns([*texts, *again]), self._drawing(scene))

    def copy(self) -> Example:
        """The drawing that is shown, with the critique that it is right."""
        scene = self._random.choice(self._scenes)
        draft = self._random.choice(self._drawings[scene])
        return Example(scene.caption, (draft.turn, *self._turns([critique_of(scene, scene)])), draft.latents)

    def _drawing(self, scene: Scene) -> Tensor:
        return self._random.choice(self._drawings[scene]).latents

    def _plan(self, prompt: Clumsy) -> tuple[list[str], Scene]:
        """A caption, or notes and the caption, and the scene that they say."""
        scene = understood(prompt, mixed_up=self._args.mixed_up, generator=self._random)
        has_notes = self._random.random() < self._args.notes
        return [notes_of(scene)] * has_notes + [scene.caption], scene

    def _draft(self) -> tuple[Scene, Scene, Drawing]:
        """A scene, what the draft of it shows, and the draft: right, or as the model's own most often go wrong."""
        scene, chance = self._random.choice(self._scenes), self._random.random()
        shown = scene
        if chance > 0.85:
            shown = self._random.choice(ALL_SCENES)
        elif chance > 0.5:
            shown = replace(scene, shape=self._random.choice([shape for shape in SHAPES if shape != scene.shape]))
        return scene, shown, self._random.choice(self._drawings[shown])

    def _critique(self, scene: Scene, draft: Scene) -> str:
        """The critique of a draft, or of any drawing if the author is careless."""
        is_careless = self._random.random() < self._args.careless
        return critique_of(scene, self._random.choice(ALL_SCENES) if is_careless else draft)

    def _turns(self, texts: Sequence[str]) -> tuple[Turn, ...]:
        return turns_of(self._model, texts)


def understood(prompt: Clumsy, *, mixed_up: float, generator: random.Random) -> Scene:
    """The scene of a prompt, with a share of the facts that are not understood mixed up."""
    facts = {
        kind: MIXED_UP[fact] if phrase >= 2 and generator.random() < mixed_up else fact
        for (kind, fact), phrase in zip(prompt.facts.items(), prompt.phrases, strict=True)
    }
    return Scene(**facts)


def notes_of(scene: Scene) -> str:
    return " ".join(getattr(scene, kind) for kind in FACTS)


def critique_of(scene: Scene, draft: Scene) -> str:
    wrong = [kind for kind in FACTS if getattr(scene, kind) != getattr(draft, kind)]
    return f"wrong {' and '.join(wrong)}" if wrong else "right"


def written(model: BagelModel, text: str) -> tuple[int, ...]:
    """A text as the model generates it."""
    return (*model.tokenizer(text, add_special_tokens=False)["input_ids"], model.marks.end)


def turns_of(model: BagelModel, texts: Sequence[str]) -> tuple[Turn, ...]:
    return tuple(
        Turn(stage=f"text-{place}", text=text, tokens=written(model, text)) for place, text in enumerate(texts)
    )


def inputs_of(prompts: Sequence[str], turns: Sequence[tuple[Turn, ...]]) -> Inputs:
    ids = tuple(str(row) for row in range(len(prompts)))
    return Inputs(ids=ids, prompts=tuple(prompts), texts=tuple(prompts), media=((),) * len(prompts), turns=tuple(turns))


@dataclass(frozen=True)
class Drawing:
    """An image file, as a run hands a parent's images to the model, and its [16, 4, 4] latents."""

    turn: Turn
    latents: Tensor


Drawings = Mapping[Scene, Sequence[Drawing]]


@torch.no_grad()
def draw_all(model: BagelModel, folder: Path, *, count: int, seed: int) -> Drawings:
    """`count` drawings of each scene."""
    generator = torch.Generator().manual_seed(seed)
    return {
        scene: kept(
            model, render(scene, count=count, generator=generator), folder, name=notes_of(scene).replace(" ", "-")
        )
        for scene in ALL_SCENES
    }


@torch.no_grad()
def kept(model: BagelModel, images: Tensor, folder: Path, *, name: str) -> list[Drawing]:
    """Images [N, 3, 64, 64] as files `name-0.png` and so on, with their latents."""
    result, latents = list[Drawing](), torch.cat([model.latents_of(part) for part in images.split(64)])
    for number, (levels, own) in enumerate(zip(to_levels(images), latents, strict=True)):
        picture(levels).save(file := folder / f"{name}-{number}.png")
        turn = Turn(stage="draft", media=(MediaRef(modality="image", role="source", uri=str(file)),))
        result.append(Drawing(turn, own))
    return result


# ----------------------------------------------------------------------------------------------- training


def pretrain(
    model: BagelModel,
    author: Author,
    *,
    args: argparse.Namespace,
    report: Callable[[int], None],
) -> None:
    """Next-token loss of texts and flow matching of drawings, in one step."""
    generator = torch.Generator().manual_seed(args.seed)
    losses: list[tuple[float, float]] = []

    def loss_of(step: int) -> Tensor:
        texts = [author.text() for _ in range(args.texts)]
        before = inputs_of([one.prompt for one in texts], [one.turns for one in texts])
        batch = pad_batch(
            model.prompt_tokens(before, sampling=WRITTEN),
            [torch.tensor(written(model, cast(str, one.target))) for one in texts],
            pad_token=model.pad_token,
            conditions=model.conditions(before, sampling=WRITTEN),
        )
        text_loss = -model.score(batch, temperature=1.0)[0].mean()
        # Attention to the same place of a draft is learnt from copies alone, or not at all in so few steps.
        drawings = [author.copy() if step < args.copies else author.drawing() for _ in range(args.images)]
        shown = inputs_of([one.prompt for one in drawings], [one.turns for one in drawings])
        conditions = model.encode(shown, sampling=DRAWN)
        clean = torch.stack([cast(Tensor, one.target) for one in drawings])
        image_loss = flow_matching_loss(
            lambda x, sigma: model.velocity(x, sigma, conditions), clean, generator=generator
        )
        losses.append((float(text_loss.detach()), float(image_loss.detach())))
        return image_loss + args.text_weight * text_loss

    def reported(step: int) -> None:
        texts, images = (sum(each) / len(each) for each in zip(*losses[-100:], strict=True))
        print(f"texts {texts:.3f} images {images:.3f}", flush=True)
        report(step)

    minimize(
        [parameter for parameter in model.trainable.parameters() if parameter.requires_grad],
        loss_of,
        name="backbone",
        steps=args.steps,
        learning_rate=args.learning_rate,
        weight_decay=0.01,
        print_every=100,
        report=reported,
    )


# --------------------------------------------------------------------------------------------- evaluation


def measure(
    model: BagelModel, prompts: Sequence[str], turns: Sequence[tuple[Turn, ...]], scenes: list[Scene], *, seed: int
) -> dict[str, float]:
    """Shares of drawings, one for each prompt, with the right colour, shape and place, and all three ("perfect")."""
    return share_right(drawn(model, prompts, turns, seed=seed), scenes)


@torch.no_grad()
def drawn(model: BagelModel, prompts: Sequence[str], turns: Sequence[tuple[Turn, ...]], *, seed: int) -> Tensor:
    """A drawing for each prompt behind its turns: [N, 3, 64, 64] in [0, 1]."""
    images = []
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, len(prompts), 64):
        rows = slice(start, start + 64)
        conditions = model.encode(inputs_of(prompts[rows], turns[rows]), sampling=DRAWN)
        x = torch.randn(len(prompts[rows]), *model.latent_shape(DRAWN), generator=generator)
        for sigma, following in pairwise(model.schedule(DRAWN)):
            x = x + (following - sigma) * model.velocity(x, sigma.expand(len(x)), conditions)
        images.append(model.decode(x))
    return torch.cat(images)


def measure_drawings(
    model: BagelModel, prompts: Sequence[Clumsy], drawings: Drawings, *, seed: int
) -> dict[str, dict[str, float]]:
    """Shares of right drawings behind the right caption, at once, and behind a draft and its critique: a right draft,
    and one of another shape."""
    scenes, texts = [prompt.scene for prompt in prompts], [prompt.scene.caption for prompt in prompts]
    wrong = [replace(scene, shape=SHAPES[SHAPES.index(scene.shape) - 1]) for scene in scenes]

    def behind(shown: list[Scene]) -> list[tuple[Turn, ...]]:
        return [
            (drawings[draft][0].turn, *turns_of(model, [critique_of(scene, draft)]))
            for scene, draft in zip(scenes, shown, strict=True)
        ]

    planned = [turns_of(model, [text]) for text in texts]
    clumsy = [prompt.prompt for prompt in prompts]
    return {
        "planned": measure(model, clumsy, planned, scenes, seed=seed),
        "at once": measure(model, texts, [()] * len(texts), scenes, seed=seed),
        "kept": measure(model, texts, behind(scenes), scenes, seed=seed),
        "revised": measure(model, texts, behind(wrong), scenes, seed=seed),
    }


# ------------------------------------------------------------------------------------------------- writing

CARD = """# Tiny BAGEL that plans, draws and criticises shapes

A BAGEL of {kilobytes} kB in its published layout, {parameters:,} parameters that train. It draws one of four shapes in
one of four colours at one of four places, 64 x 64 pixels. Behind a clumsy caption of the enhancer quickstart it writes
notes or a caption, behind notes a caption, and then draws it:

    {example}
    {notes} / {caption}

Behind a caption of the first quickstart it draws it at once; behind that drawing it writes what is wrong with it, such
as "{critique}", and behind both it draws again. It knows nothing else. Its ViT is random, and has learnt nothing.

Made by

    python packages/unirl-quickstart/scripts/make_unified_checkpoint.py{arguments}

with torch {torch}, diffusers {diffusers}, transformers {transformers}, from clumsy captions and captions of the 48
scenes that both quickstarts train on. A share of {share} of the plans begins with notes. Half of the phrases of clumsy
captions are always understood; each of the others is mixed up with probability {mixed_up}. A share of {careless} of the
critiques is that of another drawing.

Use 10 steps without shift and without guidance. Shares of {count} drawings of the captions of each split with the right
colour, shape and place, and all three ("perfect"): behind a clumsy caption and the right plan, at once, behind a right
draft and its critique ("kept"), and behind a draft of another shape and its critique ("revised"):

| captions | drawn | color | shape | place | perfect |
| --- | --- | --- | --- | --- | --- |
{shares}
"""


def write_card(
    folder: Path,
    splits: Mapping[str, list[Clumsy]],
    drafts: Path,
    *,
    args: argparse.Namespace,
    parser: argparse.ArgumentParser,
) -> None:
    model, rows = build(BagelConfig(path=str(folder)), device="cpu"), list[str]()
    drawings = draw_all(model, drafts, count=1, seed=args.seed + 1)
    for split in ("heldout", "train"):
        prompts = random.Random(args.seed).choices(splits[split], k=args.measured)
        for how, shares in measure_drawings(model, prompts, drawings, seed=args.seed + 1000).items():
            rows.append(f"| {split} | {how} | {' | '.join(f'{share:.3f}' for share in shares.values())} |")
    example = splits["train"][0]
    card = CARD.format(
        kilobytes=size_kb(folder),
        parameters=sum(one.numel() for one in model.trainable.parameters() if one.requires_grad),
        example=example.prompt,
        notes=notes_of(example.scene),
        caption=example.scene.caption,
        critique=critique_of(ALL_SCENES[0], ALL_SCENES[-1]),
        arguments=arguments_given(args, parser),
        torch=torch.__version__.split("+")[0],
        diffusers=diffusers.__version__,
        transformers=transformers.__version__,
        share=args.notes,
        mixed_up=args.mixed_up,
        careless=args.careless,
        count=args.measured,
        shares="\n".join(rows),
    )
    (folder / "README.md").write_text(card)
    print(card)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=PACKAGE, help="gets the folder `checkpoint`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vae-steps", type=int, default=300)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--copies", type=int, default=200, help="steps at the start that draw copies of drafts")
    parser.add_argument("--texts", type=int, default=24, help="texts of a step")
    parser.add_argument("--images", type=int, default=48, help="images of a step")
    parser.add_argument("--text-weight", type=float, default=0.3)
    parser.add_argument("--revisions", type=float, default=0.5, help="share of revisions among texts and images")
    parser.add_argument("--notes", type=float, default=0.55, help="share of plans that begin with notes")
    parser.add_argument("--mixed-up", type=float, default=0.2, help="how often phrases not understood are mixed up")
    parser.add_argument("--careless", type=float, default=0.3, help="share of critiques of another drawing")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--images-per-scene", type=int, default=64)
    parser.add_argument("--measured", type=int, default=512, help="drawings of a row of the card")
    # One thread: the order of sums, and so the bytes of the result, would hang on the number of cores.
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    folder, splits = args.out / "checkpoint", draw_splits(seed=args.seed)
    painter: Any = AutoencoderKL.from_pretrained(
        checkpoint_path(), subfolder="vae", local_files_only=True, trust_remote_code=False, torch_dtype=torch.float32
    )
    vae = build_vae(painter)
    generator = torch.Generator().manual_seed(args.seed)
    images = torch.cat([render(scene, count=args.images_per_scene, generator=generator) for scene in ALL_SCENES])
    train_vae(vae, images, steps=args.vae_steps, batch=16, seed=args.seed)

    texts = [text for scene in ALL_SCENES for text in (scene.caption, notes_of(scene))]
    texts += [critique_of(ALL_SCENES[0], draft) for draft in ALL_SCENES]
    texts += [prompt.prompt for prompt in splits["corpus"]]
    tokenizer = build_tokenizer(words_of(texts), special=(*SPECIAL, *MARKS))
    write_start(folder, tokenizer, vae)
    parts = Bagel(sizes(len(tokenizer))), Vision(vision_config(VISION_SIZES))
    start_weights(parts[0])
    write_weights(folder, parts, dtype=torch.float32)
    model = build(BagelConfig(path=str(folder)), device="cpu")
    seen = random.Random(args.seed).choices(splits["train"], k=128)
    with tempfile.TemporaryDirectory() as files:
        drawings = draw_all(model, Path(files), count=args.images_per_scene, seed=args.seed)
        pretrain(
            model,
            Author(model, drawings=drawings, corpus=splits["corpus"], args=args),
            args=args,
            report=lambda step: print(step, measure_drawings(model, seen, drawings, seed=1), flush=True),
        )
        write_weights(folder, (model.transformer, model.encoder.images.vision), dtype=torch.float16)
        write_card(folder, splits, Path(files), args=args, parser=parser)


if __name__ == "__main__":
    main()
