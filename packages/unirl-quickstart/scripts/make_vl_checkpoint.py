"""Makes the vision-language quickstart's checkpoint, a Qwen3-VL of about 1 MB that names coloured shapes, and images.

    python packages/unirl-quickstart/scripts/make_vl_checkpoint.py

First it learns from correct names. Then, with the vision tower frozen, it is fine-tuned on the names of a careless
annotator, who calls most disks rings and most yellow shapes green. So it sees well and answers badly, and RL
post-training finds the right names from a reward alone.
Seeded throughout; the same machine and library versions give the same bytes. About four minutes on one core.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from checkpoint_files import arguments_given, picture, size_kb, to_levels, write_prompts
from tiny_qwen3 import SPECIAL, build_tokenizer, complete, corpus_rows, pretrain
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.utils import logging as transformers_logging
from unirl.models.qwen_vl.tiny import CHAT_TEMPLATE, image_processor
from unirl.rewards.rules.shapes_world import ALL_SCENES, COLORS, SHAPES, SIZE_PX, Scene, render

PACKAGE = Path(__file__).resolve().parents[1] / "src/unirl/quickstart/vl"
IMAGES_PER_SCENE = {"train": 2, "heldout": 4}
"""For each of the 48 and 16 scenes."""
PROMPT = "What is it?"
MAX_NEW_TOKENS = 4
"""A colour, a shape and an end leave one."""

PATCH_PX, MERGE = 8, 2
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
KINDS = (tuple(COLORS), SHAPES)
CONFUSED = {"disk": "ring", "yellow": "green"}
"""Names that the annotator mostly gives to them."""


# -------------------------------------------------------------------------------------------- images, names


def draw_splits(*, seed: int) -> dict[str, list[tuple[Scene, Tensor]]]:
    """`train` and `heldout`: scenes with their images [3, 64, 64], rounded to 8 bits.

    Held-out scenes are those of the painter's own held-out captions.
    """
    generator = torch.Generator().manual_seed(seed)
    splits: dict[str, list[tuple[Scene, Tensor]]] = {"train": [], "heldout": []}
    for scene in ALL_SCENES:
        split = "heldout" if scene.is_held_out else "train"
        images = render(scene, count=IMAGES_PER_SCENE[split], generator=generator)
        splits[split] += [(scene, image) for image in to_levels(images)]
    return splits


def careless_name(scene: Scene, generator: random.Random, *, confused: float, misnamed: float) -> str:
    """Colour and shape as the annotator writes them.

    confused: probability of the wrong word for the facts in `CONFUSED`.  misnamed: that of any other word of the same
    kind for the other facts.
    """
    words: list[str] = []
    for fact, known in zip((scene.color, scene.shape), KINDS, strict=True):
        is_wrong = generator.random() < (confused if fact in CONFUSED else misnamed)
        others = [CONFUSED[fact]] if fact in CONFUSED else [word for word in known if word != fact]
        words.append(generator.choice(others) if is_wrong else fact)
    return " ".join(words)


def true_name(scene: Scene) -> str:
    return f"{scene.color} {scene.shape}"


# ------------------------------------------------------------------------------------------ model, tokenizer


def vl_tokenizer() -> Any:
    # The long ones first: "green" would otherwise be split around the "re" of "red".
    first = sorted(("What", "user", "assistant", *COLORS), key=len, reverse=True)
    words = [" is", " it", *(f" {shape}" for shape in SHAPES), *first]
    return build_tokenizer(words, special=(*SPECIAL, *VISION), chat_template=CHAT_TEMPLATE)


def vl_processor() -> Any:
    return image_processor(patch_size=PATCH_PX, most_pixels=SIZE_PX**2)


def build_vl_model(tokenizer: Any) -> Qwen3VLForConditionalGeneration:
    names = ("vision_start", "vision_end", "image", "video")
    tokens = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in zip(names, VISION, strict=True)
    }
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            # vLLM has no attention for narrower heads on a CPU.
            "head_dim": 32,
            "max_position_embeddings": 512,
            # Time, height and width turn 4, 6 and 6 of the 16 pairs of a head.
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [4, 6, 6],
                "mrope_interleaved": True,
            },
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": None,
            "bos_token_id": None,
        },
        vision_config={
            "depth": 4,
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_heads": 4,
            "patch_size": PATCH_PX,
            "spatial_merge_size": MERGE,
            "out_hidden_size": 64,
            "num_position_embeddings": (SIZE_PX // PATCH_PX) ** 2,
            "deepstack_visual_indexes": [1],
        },
        tie_word_embeddings=True,
        **tokens,
    )
    model = Qwen3VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def chat(tokenizer: Any) -> str:
    """The prompt about one image, in the chat template, with a placeholder for every merged patch."""
    content = [{"type": "image"}, {"type": "text", "text": PROMPT}]
    text: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    image = VISION[2]
    return text.replace(image, image * (SIZE_PX // PATCH_PX // MERGE) ** 2)


def seen(tokens: Tensor, tokenizer: Any, levels: Sequence[Tensor]) -> dict[str, Tensor]:
    """Model inputs besides tokens [n, L], one image each."""
    pixels = vl_processor()([picture(image) for image in levels], return_tensors="pt")
    return {**pixels, "mm_token_type_ids": (tokens == tokenizer.convert_tokens_to_ids(VISION[2])).int()}


# ------------------------------------------------------------------------------------------------ training


def batches(
    tokenizer: Any, name: Callable[[Scene], str], *, batch: int, seed: int
) -> Callable[[], Iterator[tuple[dict[str, Tensor], Tensor]]]:
    """A function that draws the batch of a step: new images of scenes of `train`, with their names from `name`."""
    generator, scenes = torch.Generator().manual_seed(seed), [scene for scene in ALL_SCENES if not scene.is_held_out]
    prompt: list[int] = tokenizer(chat(tokenizer))["input_ids"]

    def draw() -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        chosen = [scenes[row] for row in torch.randint(len(scenes), (batch,), generator=generator)]
        levels = to_levels(torch.cat([render(scene, count=1, generator=generator) for scene in chosen]))
        tokens, labels = corpus_rows(tokenizer, [prompt] * batch, [name(scene) for scene in chosen])
        yield {"input_ids": tokens, **seen(tokens, tokenizer, list(levels))}, labels

    return draw


# ---------------------------------------------------------------------------------------------- evaluation


def measure(
    model: Any, tokenizer: Any, images: Sequence[tuple[Scene, Tensor]], *, greedy: bool, seed: int
) -> dict[str, float]:
    """Shares of answers, one an image, with the right colour, shape, and both."""
    prompts = [chat(tokenizer)] * len(images)
    tokens = torch.tensor(tokenizer(prompts)["input_ids"])
    media = seen(tokens, tokenizer, [levels for _, levels in images])
    texts = complete(model, tokenizer, prompts, max_new_tokens=MAX_NEW_TOKENS, greedy=greedy, seed=seed, media=media)
    pairs = [(text.split(), scene) for text, (scene, _) in zip(texts, images, strict=True)]
    hits = {
        "color": [scene.color in words for words, scene in pairs],
        "shape": [scene.shape in words for words, scene in pairs],
        "both": [words == true_name(scene).split() for words, scene in pairs],
    }
    return {kind: sum(each) / len(each) for kind, each in hits.items()}


# ------------------------------------------------------------------------------------------------- writing

CARD = """# Tiny Qwen3-VL that names shapes

A `Qwen3VLForConditionalGeneration` of {kilobytes} kB, {parameters:,} parameters, that answers "{prompt}" about a
64 x 64 px image of a coloured shape: "red ring". It knows nothing else.

Made by

    python packages/unirl-quickstart/scripts/make_vl_checkpoint.py{arguments}

with torch {torch}, transformers {transformers}. First it learned the correct names, in {steps:,} steps on images of
the 48 scenes of `train.jsonl`, drawn anew in each step; then, in {careless_steps:,} steps with the vision tower frozen,
those of a careless annotator, who calls a disk a ring and yellow green with probability {confused}, and gives every
other colour and shape a wrong name with probability {misnamed}.

Shares of answers, one per image, with the right colour, the right shape, and both. The first row is of the model
before it learned from the annotator.

| images | sampling | color | shape | both |
| --- | --- | --- | --- | --- |
{shares}
"""


def row(scene: Scene, number: int) -> dict[str, Any]:
    name = f"{scene.color}-{scene.shape}-{scene.place}-{number}"
    return {
        "prompt": PROMPT,
        "prompt_id": name,
        "media": [{"modality": "image", "role": "condition", "uri": f"images/{name}.png"}],
        "metadata": {"color": scene.color, "shape": scene.shape},
    }


def write_images(folder: Path, splits: dict[str, list[tuple[Scene, Tensor]]]) -> None:
    """The prompt files, and the images beside them."""
    rows: dict[str, list[dict[str, Any]]] = {}
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for split, images in splits.items():
        rows[split] = [row(scene, number % IMAGES_PER_SCENE[split]) for number, (scene, _) in enumerate(images)]
        for each, (_, levels) in zip(rows[split], images, strict=True):
            picture(levels).save(folder / each["media"][0]["uri"])
    write_prompts(folder, rows)


def shares(title: str, result: dict[str, float]) -> str:
    return f"| {title} | {' | '.join(f'{share:.3f}' for share in result.values())} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=PACKAGE, help="gets the folders `checkpoint` and `prompts`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=800, help="steps on correct names")
    parser.add_argument("--careless-steps", type=int, default=300, help="steps on the careless annotator's names")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--confused", type=float, default=0.6, help="how often disks are rings, and yellow is green")
    parser.add_argument("--misnamed", type=float, default=0.2, help="how often other facts have a wrong name")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--measured", type=int, default=96, help="images of a split, at most, that the card is of")
    # One thread: the order of sums, and so the bytes of the result, would hang on the number of cores.
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    transformers_logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    splits = draw_splits(seed=args.seed)
    tokenizer = vl_tokenizer()
    model = build_vl_model(tokenizer)
    draw = batches(tokenizer, true_name, batch=args.batch, seed=args.seed + 1)
    pretrain(model, draw, steps=args.steps, learning_rate=args.learning_rate)
    seeing = measure(model, tokenizer, splits["heldout"][: args.measured], greedy=True, seed=0)
    lines = [shares("heldout | greedy, before", seeing)]

    annotator = random.Random(args.seed)
    draw = batches(
        tokenizer,
        lambda scene: careless_name(scene, annotator, confused=args.confused, misnamed=args.misnamed),
        batch=args.batch,
        seed=args.seed + 2,
    )
    model.model.visual.requires_grad_(False)
    pretrain(model, draw, steps=args.careless_steps, learning_rate=args.learning_rate / 4)
    folder = args.out / "checkpoint"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    vl_processor().save_pretrained(folder)
    write_images(args.out / "prompts", splits)

    model = Qwen3VLForConditionalGeneration.from_pretrained(
        folder, local_files_only=True, dtype=torch.float32, trust_remote_code=False
    ).eval()
    for split, greedy in product(("heldout", "train"), (True, False)):
        result = measure(model, tokenizer, splits[split][: args.measured], greedy=greedy, seed=args.seed + 1000)
        lines.append(shares(f"{split} | {'greedy' if greedy else 'temperature 1'}", result))
    card = CARD.format(
        kilobytes=size_kb(folder),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        prompt=PROMPT,
        arguments=arguments_given(args, parser),
        torch=torch.__version__.split("+")[0],
        transformers=transformers.__version__,
        steps=args.steps,
        careless_steps=args.careless_steps,
        confused=args.confused,
        misnamed=args.misnamed,
        shares="\n".join(lines),
    )
    (folder / "README.md").write_text(card)
    print(card)


if __name__ == "__main__":
    main()
