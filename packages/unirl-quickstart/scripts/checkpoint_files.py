"""Images, prompt files, tokenizers and model cards, as all scripts of this folder write them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor
from transformers import CLIPTokenizer, T5Tokenizer

__all__ = [
    "arguments_given",
    "clip_tokenizer",
    "picture",
    "size_kb",
    "t5_tokenizer",
    "to_levels",
    "write_in_half",
    "write_prompts",
]


def to_levels(images: Tensor) -> Tensor:
    """Pixels in [0, 1] as the levels of an image file."""
    return (images * 255).round().byte()


def picture(levels: Tensor) -> Image.Image:
    """levels: [3, H, W] uint8."""
    return Image.fromarray(levels.permute(1, 2, 0).numpy())


def write_in_half(pipeline: Any, folder: Path) -> Any:
    """Save a pipeline of diffusers in half precision where it is read back as fp32; returns it as it is read back.

    The text encoder stays in fp32: transformers would keep half precision on loading.
    """
    pipeline.transformer.half()
    pipeline.vae.half()
    pipeline.save_pretrained(folder)
    return type(pipeline).from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def clip_tokenizer(words: Iterable[str], *, max_length: int) -> CLIPTokenizer:
    """A CLIP BPE tokenizer with every byte, in which each of `words` is one token."""
    symbols = list(_byte_symbols())
    vocab = ["<|startoftext|>", "<|endoftext|>", *symbols, *(symbol + "</w>" for symbol in symbols)]
    merges: list[tuple[str, str]] = []
    for word in words:
        pieces = [*word[:-1], word[-1] + "</w>"]
        while len(pieces) > 1:
            left, right, *rest = pieces
            if (left, right) not in merges:
                merges.append((left, right))
            if left + right not in vocab:
                vocab.append(left + right)
            pieces = [left + right, *rest]
    return CLIPTokenizer(
        vocab={token: index for index, token in enumerate(vocab)},
        merges=merges,
        model_max_length=max_length,
    )


def t5_tokenizer(words: Iterable[str]) -> T5Tokenizer:
    """A T5 unigram tokenizer in which each of `words` is one token and other text falls back to letters."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz0123456789.,"]
    pieces = [*((f"▁{word}", -3.0) for word in words), *((letter, -12.0) for letter in letters)]
    return T5Tokenizer(vocab=[*special, *pieces], extra_ids=0, model_max_length=16)


def write_prompts(folder: Path, splits: Mapping[str, Iterable[Mapping[str, Any]]]) -> None:
    """One file `<split>.jsonl` per split, one JSON row per prompt."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def arguments_given(args: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """The arguments that differ from their defaults, as a command line; `--out` changes no bytes and is left out."""
    return "".join(
        f" --{name.replace('_', '-')}" + (f" {' '.join(map(str, value))}" if isinstance(value, list) else f"={value}")
        for name, value in vars(args).items()
        if name != "out" and value != parser.get_default(name)
    )


def size_kb(folder: Path) -> int:
    """Size of a checkpoint in units of 1000 bytes, without its card."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != "README.md"]
    return round(sum(file.stat().st_size for file in files) / 1000)


def _byte_symbols() -> Iterable[str]:
    """The 256 printable characters by which byte-level BPE writes bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = iter(range(256, 512))
    return (chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256))
