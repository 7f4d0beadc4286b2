"""Qwen-Image-Edit and Qwen-Image-Edit-Plus on checkpoints of random weights, with the pipelines that they are compared
with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusers import QwenImageEditPipeline, QwenImageEditPlusPipeline
from unirl.core.types.data import MediaRef
from unirl.models.qwen_image import edit, tiny
from unirl.models.qwen_image.config import QwenImageEditConfig, QwenImageEditPlusConfig
from unirl.models.qwen_image.edit import QwenImageEditModel
from unirl.models.qwen_image.parity import tell_token_types

__all__ = ["AREAS", "Editor", "editor_of"]

AREAS = {"source_area": 64 * 64, "condition_area": 56 * 56}
"""Areas of images in place of the published ones, so that a forward takes milliseconds."""


@dataclass(frozen=True, kw_only=True)
class Editor:
    """One of the two editing models, with a checkpoint of it."""

    name: str
    folder: Path
    model: QwenImageEditModel
    pipeline: Any
    """diffusers' pipeline on the model's own components."""
    sources: Callable[..., tuple[MediaRef, ...]]
    """sources(folder, number=): writes those of a sample."""

    def built(self, **settings: Any) -> QwenImageEditModel:
        """The model, with the small areas unless others are given."""
        if self.name == "edit":
            small = {"source_area": AREAS["source_area"]}
            return edit.build(QwenImageEditConfig(path=str(self.folder), **{**small, **settings}), device="cpu")
        return edit.build_plus(QwenImageEditPlusConfig(path=str(self.folder), **{**AREAS, **settings}), device="cpu")

    def with_default_areas(self) -> QwenImageEditModel:
        if self.name == "edit":
            return edit.build(QwenImageEditConfig(path=str(self.folder)), device="cpu")
        return edit.build_plus(QwenImageEditPlusConfig(path=str(self.folder)), device="cpu")

    def pipeline_of(self, model: QwenImageEditModel, *, token_types: bool = True) -> Any:
        """token_types: see `QwenImageEditConfig`; without them it is diffusers' pipeline as it is."""
        kind = QwenImageEditPipeline if self.name == "edit" else QwenImageEditPlusPipeline
        result = kind(**model.pipeline.components)
        result.set_progress_bar_config(disable=True)
        if token_types:
            tell_token_types(result)
        return result


def editor_of(name: str, folder: Path) -> Editor:
    write, sources = (tiny.write_edit, tiny.media) if name == "edit" else (tiny.write_edit_plus, tiny.media_plus)
    write(folder, seed=0)
    empty: Any = None
    bare = Editor(name=name, folder=folder, model=empty, pipeline=None, sources=sources)
    model = bare.built()
    return Editor(name=name, folder=folder, model=model, pipeline=bare.pipeline_of(model), sources=sources)
