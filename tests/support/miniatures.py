"""Fixtures of a model's miniature, for the `conftest.py` of its package, which names them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from unirl.core.types.data import MediaRef

__all__ = ["folder_of", "media_of", "model_of", "on_its_components", "pipeline_of"]


def folder_of(name: str, write: Callable[..., None]) -> Any:
    """The miniature's folder, called `name`; tests leave it as it is.  write: of the package."""

    @pytest.fixture(scope="session")
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        result = tmp_path_factory.mktemp("miniature") / name
        write(result, seed=0)
        return result

    return folder


def model_of(build: Callable[..., Any], config: Callable[..., Any]) -> Any:
    """The model on the fixture `tiny_folder`; tests leave it as it is."""

    @pytest.fixture(scope="session")
    def model(tiny_folder: Path) -> Any:
        return build(config(path=str(tiny_folder)), device="cpu")

    return model


def pipeline_of(cls: Any) -> Any:
    """diffusers' pipeline on the components of the fixture `model`.

    A convolution's last bit depends on where its weights lie in memory. That they are the weights that diffusers loads
    is a separate test, and conformance compares with a pipeline that was loaded apart from the model.
    """

    @pytest.fixture(scope="session")
    def pipeline(model: Any) -> Any:
        return on_its_components(cls, model)

    return pipeline


def on_its_components(cls: Any, model: Any) -> Any:
    """diffusers' pipeline on a model's own components, see `pipeline_of`."""
    result = cls(**model.pipeline.components)
    result.set_progress_bar_config(disable=True)
    return result


def media_of(media: Callable[..., Sequence[MediaRef]]) -> Any:
    """Source images of three samples: one image, one, two; all of other sizes.  media: of the package."""

    @pytest.fixture(scope="session")
    def sources(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[MediaRef, ...]]:
        folder = tmp_path_factory.mktemp("sources")
        return [tuple(media(folder, number=number)) for number in range(3)]

    return sources
