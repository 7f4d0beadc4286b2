"""Modules beside these tests are imported by them, too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from unirl.core.types.sampling import LatentSamplingConfig

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("wan_engines")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model's miniature, by name; tests leave it as it is."""
    from wan_models import write

    @cache
    def folder(name: str) -> Path:
        result = tmp_path_factory.mktemp(name) / "tiny"
        write(name, result)
        return result

    return folder


@pytest.fixture(scope="session")
def model_of(tiny: Callable[[str], Path]) -> Callable[[str], Any]:
    """A model on its miniature, by name, the same one each time; tests leave it as it is."""
    from wan_models import built

    return cache(lambda name: built(name, tiny(name)))


@pytest.fixture
def sampling() -> LatentSamplingConfig:
    """Frames, height and width differ, so that none can be taken for another."""
    return LatentSamplingConfig(
        num_inference_steps=4, frames=9, height=32, width=64, max_sequence_length=48, kernel="euler", eta=0.0
    )


@pytest.fixture
def frame_sampling() -> LatentSamplingConfig:
    """The same with the length of prompts that transformers take beside features of a first frame."""
    return LatentSamplingConfig(
        num_inference_steps=4, frames=9, height=32, width=64, max_sequence_length=512, kernel="euler", eta=0.0
    )
