"""Scripts beside these tests are imported by them, too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from miniatures import folder_of, model_of
from tiny_pipelines.families import FAMILIES, write
from tiny_pipelines.small_images import small_images
from unirl.models.diffusers import tiny
from unirl.models.diffusers.config import DiffusersConfig
from unirl.models.diffusers.model import DiffusersModel, build


# For each module: it ends before tests of other plugins begin in this process.
@pytest.fixture(scope="module", autouse=True)
def _small_images_and_no_torchvision() -> Any:
    with small_images():
        yield


tiny_folder = folder_of("diffusers", tiny.write)
model = model_of(build, DiffusersConfig)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("diffusers") / name.replace(" ", "-")
            write(made[name], name)
        return made[name]

    return of


@pytest.fixture(scope="session")
def load(folder: Callable[[str], Path]) -> Callable[..., DiffusersModel]:
    """The model of this pipeline, made once for the same settings."""
    made: dict[str, DiffusersModel] = {}

    def of(name: str, **settings: Any) -> DiffusersModel:
        key = f"{name} {settings}"
        if key not in made:
            config = DiffusersConfig(path=str(folder(name)), call=FAMILIES[name].call, **settings)
            made[key] = build(config, device="cpu")
        return made[key]

    return of
