"""Scripts beside these tests are imported by them, too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText
from unirl.core.types.inputs import Inputs
from unirl.model_host.tokens import image_miniature

sys.path.insert(0, str(Path(__file__).parent))

from unirl.models.vlm.config import VlmConfig
from unirl.models.vlm.model import Vlm, build
from vlm_families import FAMILIES

PROMPTS = ("What is it?", "Which colour has the ring on the left?", "a")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("vlm") / name
            FAMILIES[name](made[name])
        return made[name]

    return of


@pytest.fixture(scope="session")
def load(folder: Callable[[str], Path]) -> Callable[..., Vlm]:
    """A model of this family, fresh each time."""

    def make(name: str, *, lazy: bool = False, **settings: Any) -> Vlm:
        return build(VlmConfig(path=str(folder(name)), **settings), device="cpu", lazy=lazy)

    return make


@pytest.fixture(scope="session")
def load_reference(folder: Callable[[str], Path]) -> Callable[[str], Any]:
    """The checkpoint as a user of transformers loads it, apart from the model under test."""

    def make(name: str) -> Any:
        return AutoModelForImageTextToText.from_pretrained(
            folder(name), dtype=torch.float32, attn_implementation="eager"
        ).eval()

    return make


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """A prompt about one image, one about two and one about another image, each under its own id; images of
    three sizes."""
    images = tmp_path_factory.mktemp("images")
    one, two, three = (image_miniature.media(images, number=number) for number in range(3))
    return Inputs(ids=("a", "b", "c"), prompts=PROMPTS, texts=PROMPTS, media=(one, (*two, *three), two))
