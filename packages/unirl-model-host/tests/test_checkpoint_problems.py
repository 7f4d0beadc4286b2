"""What the files of a checkpoint say against training with it, read without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from unirl.model_host.checkpoint_problems import checkpoint_problems
from unirl.model_host.tokens.miniature import byte_tokenizer

SPECIAL = ("<|endoftext|>", "<|im_end|>")
SIZE = 256 + len(SPECIAL)
"""A token a byte, and the special ones."""
TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def write(folder: Path, part: str = "", tokenizer: str = "", /, **settings: Any) -> Path:
    """A checkpoint with a tokenizer of `SIZE` tokens and this config, in subfolders or not."""
    for place in (part, tokenizer):
        (folder / place).mkdir(parents=True, exist_ok=True)
    (folder / part / "config.json").write_text(json.dumps(settings))
    byte_tokenizer(SPECIAL).save_pretrained(folder / tokenizer)
    return folder


def change(file: Path, **values: Any) -> None:
    content: Mapping[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**content, **values}))


def said(folder: Path) -> list[str]:
    return [str(reason) for reason in checkpoint_problems(str(folder))]


def add_to_tokenizer(folder: Path) -> None:
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    change(folder / "tokenizer.json", added_tokens=[*added, {"id": SIZE, "content": "<new>", **TOKEN}])


ADDITIONS: Mapping[str, Any] = {
    "tokenizer.json": add_to_tokenizer,
    "added_tokens.json": lambda folder: change(folder / "added_tokens.json", **{"<new>": SIZE}),
    "special_tokens_map.json": lambda folder: change(folder / "special_tokens_map.json", cls_token="<new>"),
    "pad_token": lambda folder: change(folder / "tokenizer_config.json", pad_token="<new>"),
    "a token with settings": lambda folder: change(
        folder / "tokenizer_config.json", pad_token={"content": "<new>", "__type": "AddedToken", **TOKEN}
    ),
    "extra_special_tokens": lambda folder: change(folder / "tokenizer_config.json", extra_special_tokens=["<new>"]),
    "added_tokens_decoder": lambda folder: change(
        folder / "tokenizer_config.json", added_tokens_decoder={str(SIZE + 7): {"content": "<new>", **TOKEN}}
    ),
}
"""File or setting that adds a token, which transformers gives the next id."""


@pytest.mark.parametrize("place", ADDITIONS)
def test_a_token_past_the_embedding_is_found_wherever_it_is_added(tmp_path: Path, place: str) -> None:
    folder = write(tmp_path, vocab_size=SIZE)
    assert said(folder) == []
    ADDITIONS[place](folder)
    (reason,) = said(folder)
    expected = (
        f".path: the tokenizer in {str(folder)!r} has the token '<new>' with id {SIZE}, expected ids below {SIZE}"
    )
    assert reason.startswith(expected) and "resize_token_embeddings" in reason
    loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    assert loaded.get_vocab()["<new>"] == SIZE
    change(folder / "config.json", vocab_size=SIZE + 1)
    assert said(folder) == []


def test_the_token_of_an_image_counts_where_images_are_read(tmp_path: Path) -> None:
    """Checkpoints of texts alone may keep the tokens of their family, as Gemma 3 does."""
    folder = write(tmp_path, vocab_size=SIZE)
    change(folder / "tokenizer_config.json", image_token="<image>")
    assert said(folder) == []
    change(folder / "config.json", vision_config={}, text_config={"vocab_size": SIZE})
    assert len(said(folder)) == 1
    change(folder / "config.json", text_config={"vocab_size": SIZE + 1})
    assert said(folder) == []


def test_each_tokenizer_of_a_pipeline_is_compared_with_its_encoder(tmp_path: Path) -> None:
    names = ("text_encoder", "text_encoder_2", "transformer")
    for number, name in enumerate(names[:2]):
        write(tmp_path, name, name.replace("text_encoder", "tokenizer"), vocab_size=SIZE - number)
    write(tmp_path, "transformer", "unused", vocab_size=3)
    change(tmp_path / "model_index.json", _class_name="Any", **{name: ["library", "Class"] for name in names})
    (reason,) = said(tmp_path)
    assert f"{str(tmp_path / 'tokenizer_2')!r} has the token '<|im_end|>'" in reason


@pytest.mark.parametrize("part", ["", "transformer", "text_encoder"])
def test_quantized_weights_are_refused_by_the_method(tmp_path: Path, part: str) -> None:
    method = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    folder = write(tmp_path, part, quantization_config=method)
    if part:
        change(tmp_path / "model_index.json", **{part: ["library", "Class"]})
    (reason,) = said(folder)
    assert reason.startswith(
        f".path: {str(folder / part)!r} is quantized with bitsandbytes, by the quantization_config"
    )
    change(folder / part / "config.json", quantization_config=None, text_config={"quantization_config": method})
    assert len(said(folder)) == 1
    change(folder / part / "config.json", text_config={"quantization_config": {}})
    assert said(folder) == []


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path, vocab_size=SIZE)
    (folder / "tokenizer.json").write_text("{")
    (reason,) = said(folder)
    assert reason.startswith(f".path: {str(folder / 'tokenizer.json')!r} cannot be read as JSON")
    assert said(tmp_path / "gone") == []
