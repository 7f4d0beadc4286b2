from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM, Qwen3MoeForCausalLM
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import TextSamplingConfig
from unirl.models.qwen3 import tiny
from unirl.models.qwen3.config import Qwen3Config
from unirl.models.qwen3.model import Qwen3Model, build, build_moe

PROMPTS = ("What is 47 + 85?", "Say it in French: the ring is red.", "a")
ANSWERS = ("132", "l'anneau est rouge.", "<think>\n?\n</think>\n\nab")
"""Prompts and answers all differ in length."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a miniature, `dense`, `untied` or `moe`."""
    made: dict[str, Path] = {}

    def of(kind: str = "dense") -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("qwen3") / kind
            if kind == "moe":
                tiny.write_moe(made[kind], seed=0)
            else:
                tiny.write(made[kind], seed=0, tied=kind == "dense")
        return made[kind]

    return of


@pytest.fixture(scope="session")
def load(folder: Callable[..., Path]) -> Callable[..., Qwen3Model]:
    """A model of a miniature, fresh each time."""

    def make(kind: str = "dense", **settings: Any) -> Qwen3Model:
        built = build_moe if kind == "moe" else build
        return built(Qwen3Config(path=str(folder(kind)), **settings), device="cpu")

    return make


@pytest.fixture(scope="session")
def load_reference(folder: Callable[..., Path]) -> Callable[..., Any]:
    """The checkpoint as a user of transformers loads it, apart from the model under test."""

    def make(kind: str = "dense") -> Any:
        cls: Any = Qwen3MoeForCausalLM if kind == "moe" else Qwen3ForCausalLM
        return cls.from_pretrained(folder(kind), dtype=torch.float32, attn_implementation="eager").eval()

    return make


@pytest.fixture(scope="session")
def model(load: Callable[..., Qwen3Model]) -> Qwen3Model:
    """The dense miniature, for looking at."""
    return load()


@pytest.fixture(scope="session")
def texts(model: Qwen3Model) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens of the prompts, in the chat template, and of the answers; all miniatures share a tokenizer."""
    prompts = model.prompt_tokens(Inputs.of_texts(PROMPTS), sampling=TextSamplingConfig())
    return prompts, [torch.tensor(model.tokenizer(answer)["input_ids"]) for answer in ANSWERS]
