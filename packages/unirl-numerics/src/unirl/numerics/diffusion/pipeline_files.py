"""Finding and loading a checkpoint in the diffusers layout, with one clear error for each way it can be wrong.

Calls diffusers and transformers, which the plugin of the model declares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError
from torch import Tensor
from unirl.core.errors import RecipeError

from ..model_files import (
    check_filled,
    check_parts,
    check_vocabulary,
    find_checkpoint,
    loading_pipeline,
    pipeline_index,
    read_json,
    scheduler_config,
)
from .pipeline_config import PipelineConfig, pipeline_dtypes

__all__ = ["PipelineFiles", "chat_tokens"]


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
    uses_chat_template: bool = False
    """Whether prompts are put into the tokenizer's chat template, which must then be there."""

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
        if self.uses_chat_template:
            self._check_chat_template(folder)
        self.check(folder, index)
        logs = tuple(import_module(f"{library}.utils.logging") for library in ("diffusers", "transformers"))
        with loading_pipeline(folder, title=self.title, logs=cast("Any", logs), errors=(SafetensorError,)):
            result = self.pipeline.from_pretrained(
                folder, dtype=dtypes, variant=config.variant, local_files_only=True, use_safetensors=True, **parts
            )
        check_filled(folder, result.components, given=parts)
        return result

    def _check_chat_template(self, folder: Path) -> None:
        place = folder / "tokenizer"
        settings = read_json(place / "tokenizer_config.json")
        if not settings.get("chat_template") and not (place / "chat_template.jinja").is_file():
            raise RecipeError(
                f"model.path: the tokenizer in {str(folder)!r} has no chat template, in which the prompts of "
                f"{self.title} stand. Use the tokenizer of a published checkpoint, such as {self.example!r}."
            )


def chat_tokens(tokenizer: Any, texts: Sequence[str], *, length: int, enable_thinking: bool) -> tuple[Tensor, Tensor]:
    """Each text as a user's message in the tokenizer's chat template, cut and padded to `length` tokens.

    Returns ids [n, length] int64 and the mask [n, length] bool, true where they are not padding.
    """
    rendered = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=enable_thinking,
        )
        for text in texts
    ]
    tokens = tokenizer(rendered, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
    return tokens.input_ids, tokens.attention_mask.bool()
