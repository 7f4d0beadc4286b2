"""A Stable Diffusion 3 miniature for engines of images."""

from __future__ import annotations

from pathlib import Path

import pytest
from unirl.models.sd3 import tiny
from unirl.models.sd3.config import Sd3Config
from unirl.models.sd3.model import Sd3Model, build

from .latents import Ask, asking

__all__ = ["PROMPTS", "ask", "folder", "model"]

PROMPTS = ("a red ring", "a blue square on the left", "")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sd3") / "tiny"
    tiny.write(made, seed=0)
    return made


@pytest.fixture
def model(folder: Path) -> Sd3Model:
    """The trained module with the weights of the checkpoint, to be modified by tests."""
    return build(Sd3Config(path=str(folder)), device="cpu")


@pytest.fixture(scope="session")
def ask(folder: Path) -> Ask:
    """See `asking`."""
    model = build(Sd3Config(path=str(folder)), device="cpu")
    return asking(model, prompts=PROMPTS, height=64, width=64, max_sequence_length=16)
