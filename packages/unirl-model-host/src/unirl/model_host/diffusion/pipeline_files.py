"""Finding and loading a checkpoint in the diffusers layout, with one clear error for each way it can be wrong.

Calls diffusers and transformers, which the plugin of the model declares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError
from torch import Tensor
from unirl.core.errors import RecipeError

from ..chat_templates import render_chat
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

__all__ = ["PipelineFiles", "chat_texts", "chat_tokens", "check_prefix", "num_longer"]


@dataclass(frozen=True, kw_only=True)
class PipelineFiles:
    """The checkpoints of one pipeline; `find` and `load` are what `PipelineModel` takes."""

    pipeline: Any
    """Its class, a `diffusers.DiffusionPipeline`."""
    model: str
    """Name of the model in recipes."""
    title: str
    """Name of the model in errors."""
    example: str
    """A hub id of such a checkpoint."""
    vocabularies: tuple[str, ...]
    """Files of a tokenizer, one of which must be there."""
    check: Callable[[Path, Mapping[str, Any]], None]
    """check(folder, index): raises RecipeError, key `model.path`, for a checkpoint of this pipeline that serves another
    purpose. index: of `model_index.json`."""
    parts: tuple[str, ...] = ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")
    """Components without which the checkpoint is incomplete."""
    encoders: tuple[str, ...] = ("text_encoder",)
    """Components in `model.text_dtype`."""
    hint: str = ""
    """Advice in the error about a folder with another pipeline."""
    siblings: Mapping[str, str] = field(default_factory=lambda: dict[str, str]())
    """Class name of another pipeline -> the model that loads its checkpoints, for the error about one."""
    components: Callable[[Path], Mapping[str, Any]] = lambda folder: {}
    """components(folder): those that the plugin loads by itself, by name."""
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
        transformers = [part for part in self.parts if part.startswith("transformer")]
        dtypes = pipeline_dtypes(config, model=self.model, encoders=self.encoders, transformers=transformers)
        index = pipeline_index(
            folder, pipeline=self.pipeline.__name__, model=self.model, hint=self.hint, siblings=self.siblings
        )
        check_parts(folder, self.parts)
        for part in self.parts:
            # ByT5's tokens are bytes.
            if part.startswith("tokenizer") and index[part][1] != "ByT5Tokenizer":
                check_vocabulary(folder, self.vocabularies, part=part)
        scheduler_config(folder)
        if self.uses_chat_template:
            self._check_chat_template(folder)
        self.check(folder, index)
        logs = tuple(import_module(f"{library}.utils.logging") for library in ("diffusers", "transformers"))
        with loading_pipeline(folder, title=self.title, logs=cast("Any", logs), errors=(SafetensorError,)):
            parts = {**self.components(folder), **parts}
            result = self.pipeline.from_pretrained(
                folder,
                dtype=dtypes,
                variant=config.variant,
                local_files_only=True,
                use_safetensors=True,
                **parts,
                trust_remote_code=False,
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


def check_prefix(
    folder: Path,
    pipeline: Any,
    prefix: str,
    *,
    dropped: int,
    instead: str,
    tokenizer: Any = None,
    either_side: bool = False,
) -> None:
    """Raise RecipeError unless the tokenizer makes `dropped` tokens of the text before the prompt, which the pipeline
    drops after encoding, and pads behind: else a part of that text would be left in, or the beginning of every prompt
    cut off.

    prefix: that text.  instead: what to do, as a sentence.  tokenizer: None is the pipeline's.  either_side: whether
    it may pad in front, as padding is removed before these tokens are.
    """
    tokenizer = tokenizer or pipeline.tokenizer
    result, side = len(tokenizer(prefix)["input_ids"]), tokenizer.padding_side
    where = f"model.path: the tokenizer in {str(folder)!r}"
    if result != dropped:
        raise RecipeError(
            f"{where} makes {result} tokens of the text before the prompt, and {type(pipeline).__name__} drops "
            f"{dropped}. {instead}"
        )
    if side != "right" and not either_side:
        raise RecipeError(
            f"{where} pads on the {side}, where {type(pipeline).__name__} drops tokens. Set padding_side to right in "
            "its tokenizer_config.json."
        )


def chat_tokens(tokenizer: Any, texts: Sequence[str], *, length: int, enable_thinking: bool) -> tuple[Tensor, Tensor]:
    """Each text as a user's message in the tokenizer's chat template, cut and padded to `length` tokens.

    Returns ids [n, length] int64 and the mask [n, length] bool, true where they are not padding.

    Raises RecipeError, key `model.path`, for a template that fails.
    """
    rendered = chat_texts(tokenizer, texts, enable_thinking=enable_thinking)
    tokens = tokenizer(rendered, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
    return tokens.input_ids, tokens.attention_mask.bool()


def chat_texts(tokenizer: Any, texts: Sequence[str], *, enable_thinking: bool) -> list[str]:
    """Those messages before they are tokenised. Raises as `chat_tokens`."""
    return [
        render_chat(
            tokenizer,
            [{"role": "user", "content": text}],
            key="model.path",
            add_generation_prompt=True,
            enable_thinking=enable_thinking,
        )
        for text in texts
    ]


def num_longer(tokenizer: Any, texts: Sequence[str], longest: int) -> int:
    """How many texts have more tokens than `longest`, special ones included."""
    # One more than that is enough; all of them would draw a warning of transformers.
    rows = tokenizer(list(texts), max_length=longest + 1, truncation=True)["input_ids"]
    return sum(len(row) > longest for row in rows)
