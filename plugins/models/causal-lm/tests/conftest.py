"""Scripts beside these tests are imported by them, too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from causal_lm_families import write
from unirl.models.causal_lm.config import AutoCausalLmConfig
from unirl.models.causal_lm.model import AutoCausalLm, build


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = write(tmp_path_factory.mktemp("causal-lm") / name, name)
        return made[name]

    return of


@pytest.fixture(scope="session")
def load(folder: Callable[[str], Path]) -> Callable[..., AutoCausalLm]:
    """A model of this family, fresh each time."""

    def make(name: str, *, lazy: bool = False, **settings: Any) -> AutoCausalLm:
        return build(AutoCausalLmConfig(path=str(folder(name)), **settings), device="cpu", lazy=lazy)

    return make
