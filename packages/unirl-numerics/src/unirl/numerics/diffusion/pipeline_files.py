"""Finding and loading a checkpoint in the diffusers layout, with one clear error for each way it can be wrong.

Calls diffusers and transformers, which the plugin of the model declares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError

from ..model_files import (
    check_filled,
    check_parts,
    check_vocabulary,
    find_checkpoint,
    loading_pipeline,
    pipeline_index,
    scheduler_config,
)
from .pipeline_config import PipelineConfig, pipeline_dtypes

__all__ = ["PipelineFiles"]


@dataclass(frozen=True, kw_only=True)
class PipelineFiles:
    """The checkpoints of one pipeline with one text encoder; `find` and `load` are what `PipelineModel` takes."""

    pipeline: Any
    """Its class, a `diffusers.DiffusionPipeline`."""
    model: str
    """Name of the model in recipes."""
    title: str
    """Name of the model in errors."""
    example: str
    """A hub id of such a checkpoint."""
    vocabularies: tuple[str, ...]
    """Files of the tokenizer, one of which must be there."""
    check: Callable[[Path, Mapping[str, Any]], None]
    """check(folder, index): raises RecipeError, key `model.path`, for a checkpoint of this pipeline that serves another
    purpose. index: of `model_index.json`."""
    parts: tuple[str, ...] = ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")
    """Components without which the checkpoint is incomplete."""
    hint: str = ""
    """What to do about a folder with another pipeline."""

    def find(self, config: PipelineConfig) -> Path:
        """The folder of the checkpoint, fetched where it is a hub id."""

        def fetch(name: str) -> str | PathLike[str]:
            return self.pipeline.download(name, revision=config.revision, variant=config.variant, use_safetensors=True)

        return find_checkpoint(config.path, layout="diffusers", example=self.example, fetch=fetch)

    def load(self, folder: Path, config: PipelineConfig, parts: Mapping[str, Any]) -> Any:
        """The pipeline in `folder`, each component in its dtype, on the CPU; `parts` in place of its own.

        Raises RecipeError, key `model.path`, when it is not there, incomplete, or of another pipeline or purpose.
        """
        dtypes = pipeline_dtypes(config, model=self.model, encoders=("text_encoder",))
        index = pipeline_index(folder, pipeline=self.pipeline.__name__, model=self.model, hint=self.hint)
        check_parts(folder, self.parts)
        check_vocabulary(folder, self.vocabularies, part="tokenizer")
        scheduler_config(folder)
        self.check(folder, index)
        logs = tuple(import_module(f"{library}.utils.logging") for library in ("diffusers", "transformers"))
        with loading_pipeline(folder, title=self.title, logs=cast("Any", logs), errors=(SafetensorError,)):
            result = self.pipeline.from_pretrained(
                folder, dtype=dtypes, variant=config.variant, local_files_only=True, use_safetensors=True, **parts
            )
        check_filled(folder, result.components, given=parts)
        return result
