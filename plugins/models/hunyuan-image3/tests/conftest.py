"""Makes the modules beside the tests importable."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from unirl.core.types.data import MediaRef
from unirl.models.hunyuan_image3 import tiny
from unirl.models.hunyuan_image3.config import HunyuanImageConfig
from unirl.models.hunyuan_image3.model import HunyuanImageModel, build

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hunyuan") / "tiny"
    tiny.write(folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def model(tiny_folder: Path) -> HunyuanImageModel:
    return build(HunyuanImageConfig(path=str(tiny_folder)), device="cpu")


@pytest.fixture(scope="session")
def media(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[MediaRef, ...]]:
    """Of three samples: one image, one, two; all of other sizes."""
    folder = tmp_path_factory.mktemp("sources")
    return [tiny.media(folder, number=number) for number in range(3)]
