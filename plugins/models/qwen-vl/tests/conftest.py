from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import TextSamplingConfig
from unirl.models.qwen_vl import tiny
from unirl.models.qwen_vl.config import QwenVlConfig
from unirl.models.qwen_vl.model import QwenVlModel, build, build_qwen3

PROMPTS = ("What is it?", "Which colour has the ring on the left?", "a")
ANSWERS = ("132", "red, and it is a <|image_pad|>.", "a<|image_pad|><|image_pad|>b")
"""Prompts and answers all differ in length, and images in size. Answers may hold the token that stands for images."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a miniature, `qwen25` or `qwen3`."""
    made: dict[str, Path] = {}

    def of(kind: str = "qwen25") -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("qwen-vl") / kind
            write = tiny.write_qwen3 if kind == "qwen3" else tiny.write
            write(made[kind], seed=0)
        return made[kind]

    return of


@pytest.fixture(scope="session")
def load(folder: Callable[..., Path]) -> Callable[..., QwenVlModel]:
    """A model of a miniature, fresh each time."""

    def make(kind: str = "qwen25", **settings: Any) -> QwenVlModel:
        built = build_qwen3 if kind == "qwen3" else build
        return built(QwenVlConfig(path=str(folder(kind)), **settings), device="cpu")

    return make


@pytest.fixture(scope="session")
def load_reference(folder: Callable[..., Path]) -> Callable[..., Any]:
    """The checkpoint as a user of transformers loads it, apart from the model under test."""

    def make(kind: str = "qwen25") -> Any:
        return AutoModelForImageTextToText.from_pretrained(
            folder(kind), dtype=torch.float32, attn_implementation="eager"
        ).eval()

    return make


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """A prompt about one image, one about two and one about another image, each under its own id."""
    images = tmp_path_factory.mktemp("images")
    one, two, three = (tiny.media(images, number=number) for number in range(3))
    return Inputs(ids=("a", "b", "c"), prompts=PROMPTS, texts=PROMPTS, media=(one, (*two, *three), two))


@pytest.fixture(scope="session")
def answers(load: Callable[..., QwenVlModel]) -> list[Tensor]:
    """Tokens of the answers; all miniatures share a tokenizer."""
    tokenizer = load().tokenizer
    return [torch.tensor(tokenizer(answer)["input_ids"]) for answer in ANSWERS]


@pytest.fixture(scope="session")
def sampling() -> TextSamplingConfig:
    return TextSamplingConfig(max_new_tokens=10)
