"""Makes the enhancer quickstart's writer: a Qwen3 of about 1 MB that rewrites clumsy captions for the shape painter.

    python packages/unirl-quickstart/scripts/make_writer_checkpoint.py

A clumsy caption states colour, shape and place in words that the painter has never seen. The writer's corpus pairs such
captions with rewrites, but half of these are notes ("red ring left"), which the painter does not paint well, and in all
of them half of the phrases are now and then mixed up. So most rewrites are bad, though a good one is always among the
likely ones: RL post-training finds it from the painted images alone.
Seeded throughout; the same machine and library versions give the same bytes. About two minutes on one core.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from checkpoint_files import write_prompts
from tiny_qwen3 import build_model, build_tokenizer, complete, corpus_rows, pretrain, write_card
from torch import Tensor
from transformers import Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging
from unirl.rewards.rules.shapes_world import ALL_SCENES, Scene

PACKAGE = Path(__file__).resolve().parents[1] / "src/unirl/quickstart/enhancer"
PROMPTS_PER_SCENE = 8
"""Clumsy captions of each of the 64 scenes in the prompt files."""
MAX_NEW_TOKENS = 10
"""A caption has six words and an end."""

FACTS = ("color", "shape", "place")
FRAMES = (
    "thing that is {color} and {shape}, {place}",
    "something {shape}, {color}, {place}",
    "{place} put a thing {color} and {shape}",
    "please have it {place}, {shape} and {color}",
)
PHRASES = {
    "red": ("red", "crimson", "tomato-like", "blood-coloured"),
    "green": ("green", "emerald", "grass-like", "leaf-coloured"),
    "blue": ("blue", "azure", "sky-like", "sea-coloured"),
    "yellow": ("yellow", "golden", "lemon-like", "sun-coloured"),
    "square": ("square", "boxy", "like a tile", "with four corners"),
    "disk": ("round", "circular", "like a coin", "like a full moon"),
    "cross": ("crossed", "plus-shaped", "like a windmill", "with four arms"),
    "ring": ("hollow", "ring-shaped", "like a donut", "with a hole"),
    "left": ("left", "far left", "in the west", "at nine o'clock"),
    "right": ("right", "far right", "in the east", "at three o'clock"),
    "top": ("up", "high up", "in the north", "at twelve o'clock"),
    "bottom": ("down", "low down", "in the south", "at six o'clock"),
}
"""Each fact's phrases: two that the author of the corpus understands, then two that are at times mixed up."""
MIXED_UP = {
    **{"red": "green", "green": "red", "blue": "yellow", "yellow": "blue"},
    **{"square": "cross", "cross": "square", "disk": "ring", "ring": "disk"},
    **{"left": "right", "right": "left", "top": "bottom", "bottom": "top"},
}


# ------------------------------------------------------------------------------------------------ captions


@dataclass(frozen=True)
class Clumsy:
    """A clumsy caption of a scene: a sentence frame, and the phrase of each fact."""

    scene: Scene
    frame: int
    phrases: tuple[int, int, int]
    """Indices into the `PHRASES` of colour, shape and place."""

    @property
    def facts(self) -> dict[str, str]:
        return {kind: getattr(self.scene, kind) for kind in FACTS}

    @property
    def prompt(self) -> str:
        phrases = {
            kind: PHRASES[fact][phrase] for (kind, fact), phrase in zip(self.facts.items(), self.phrases, strict=True)
        }
        return FRAMES[self.frame].format(**phrases)

    @property
    def row(self) -> dict[str, Any]:
        """Row of a prompt file: the reward scores images by the metadata, regardless of the rewrite."""
        name = "-".join((*self.facts.values(), str(self.frame), *map(str, self.phrases)))
        return {"prompt": self.prompt, "prompt_id": name, "metadata": self.facts}

    def rewrite(self, generator: random.Random, *, notes: float, mixed_up: float) -> str:
        """The author's rewrite: notes or a caption, its facts as understood.

        notes: probability of notes.  mixed_up: that of mixing up a fact whose phrase is not understood.
        """
        facts = {
            kind: MIXED_UP[fact] if phrase >= 2 and generator.random() < mixed_up else fact
            for (kind, fact), phrase in zip(self.facts.items(), self.phrases, strict=True)
        }
        return " ".join(facts.values()) if generator.random() < notes else Scene(**facts).caption


def clumsy_captions(scene: Scene) -> list[Clumsy]:
    """All 256 of a scene: each frame with each phrase of each fact."""
    return [
        Clumsy(scene, frame, phrases) for frame, phrases in product(range(len(FRAMES)), product(range(4), repeat=3))
    ]


def draw_splits(*, seed: int) -> dict[str, list[Clumsy]]:
    """`train` and `heldout`, 8 captions of each scene, and `corpus`: all captions of the scenes of `train`.

    Held-out scenes are those of the painter's own held-out captions.
    """
    generator = random.Random(seed)
    splits: dict[str, list[Clumsy]] = {"train": [], "heldout": [], "corpus": []}
    for scene in ALL_SCENES:
        captions = clumsy_captions(scene)
        splits["heldout" if scene.is_held_out else "train"] += generator.sample(captions, PROMPTS_PER_SCENE)
        splits["corpus"] += [] if scene.is_held_out else captions
    return splits


def words_of(texts: Iterable[str]) -> list[str]:
    """Every word with the space before it, then the first words of texts; commas are separate tokens."""
    words = sorted({word for text in texts for word in re.findall(r"[^ ,]+", text)})
    # The long ones first: "thing" would otherwise be split around the "hi" of "high".
    first = sorted({re.split("[ ,]", text)[0] for text in texts}, key=lambda word: (-len(word), word))
    return [*(f" {word}" for word in words), *first]


# ---------------------------------------------------------------------------------------------- evaluation


def measure(
    model: Qwen3ForCausalLM, tokenizer: Any, captions: list[Clumsy], *, greedy: bool, seed: int
) -> dict[str, float]:
    """Shares of rewrites, one each, with the right colour, shape and place, of captions, and of right captions."""
    prompts = [caption.prompt for caption in captions]
    texts = complete(model, tokenizer, prompts, max_new_tokens=MAX_NEW_TOKENS, greedy=greedy, seed=seed)
    pairs = list(zip(texts, captions, strict=True))
    hits = {kind: [caption.facts[kind] in text.split() for text, caption in pairs] for kind in FACTS}
    hits["caption"] = [text in {scene.caption for scene in ALL_SCENES} for text in texts]
    hits["right"] = [text == caption.scene.caption for text, caption in pairs]
    return {name: sum(each) / len(each) for name, each in hits.items()}


# ------------------------------------------------------------------------------------------------- writing

CARD = """# Tiny Qwen3 that rewrites captions

A `Qwen3ForCausalLM` of {kilobytes} kB, {parameters:,} parameters, that rewrites clumsy captions of coloured shapes for
the painter of this package:

    {example}
    {caption}

It knows nothing else, and has no chat template: the prompt is the clumsy caption as it is.

Made by

    python packages/unirl-quickstart/scripts/make_writer_checkpoint.py{arguments}

with torch {torch}, transformers {transformers}, from {corpus:,} pairs, all captions of the 48 scenes of `train.jsonl`.
A share of {notes} of their rewrites are notes ("red ring left") and the others captions. Half of the phrases are always
understood; each of the others is mixed up with probability {mixed_up}: red with green, blue with yellow, squares with
crosses, disks with rings, left with right, top with bottom.

Shares of rewrites, one per prompt, with the right colour, shape and place, of captions, and of right captions:

| prompts | sampling | color | shape | place | caption | right |
| --- | --- | --- | --- | --- | --- | --- |
{shares}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=PACKAGE, help="gets the folders `checkpoint` and `prompts`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--notes", type=float, default=0.55, help="share of rewrites that are notes")
    parser.add_argument("--mixed-up", type=float, default=0.2, help="how often phrases not understood are mixed up")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--measured", type=int, default=512, help="prompts of a split, at most, that the card is of")
    # One thread: the order of sums, and so the bytes of the result, would hang on the number of cores.
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    transformers_logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    splits = draw_splits(seed=args.seed)
    corpus, author = splits["corpus"], random.Random(args.seed)
    texts = [caption.prompt for caption in corpus]
    rewrites = [caption.rewrite(author, notes=args.notes, mixed_up=args.mixed_up) for caption in corpus]
    tokenizer = build_tokenizer(words_of([*texts, *rewrites]))
    model = build_model(tokenizer)
    tokens, labels = corpus_rows(tokenizer, tokenizer(texts)["input_ids"], rewrites)
    generator = torch.Generator().manual_seed(args.seed)

    def draw() -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        rows = torch.randint(len(corpus), (args.batch,), generator=generator)
        yield {"input_ids": tokens[rows]}, labels[rows]

    pretrain(model, draw, steps=args.steps, learning_rate=args.learning_rate)
    folder = args.out / "checkpoint"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_prompts(
        args.out / "prompts", {split: [caption.row for caption in splits[split]] for split in ("train", "heldout")}
    )
    example = splits["train"][0]
    write_card(
        folder,
        CARD,
        measure,
        tokenizer,
        splits,
        args=args,
        parser=parser,
        example=example.prompt,
        caption=example.scene.caption,
        notes=args.notes,
        mixed_up=args.mixed_up,
    )


if __name__ == "__main__":
    main()
