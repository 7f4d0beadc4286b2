"""Loading checkpoints in the transformers layout, with one clear error for each way they can be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer
from transformers.utils import logging
from unirl.core.errors import RecipeError
from unirl.numerics.model_files import no_progress_bars

__all__ = ["Checkpoint", "load"]


class Checkpoint:
    """A model in evaluation mode with its image processor and tokenizer."""

    def __init__(self, *, kind: str, model: Any, image_processor: Any, tokenizer: Any) -> None:
        self.kind, self.model, self.image_processor, self.tokenizer = kind, model, image_processor, tokenizer


def load(path: str, *, key: str, auto: Any, kinds: Sequence[str], device: Any) -> Checkpoint:
    """Load a checkpoint in fp32 from its folder, never from the network.

    key: of the setting, for errors.  auto: the transformers class that loads the model.  kinds: accepted `model_type`s.
    Raises RecipeError when the folder is absent, holds another kind of model, or lacks files or weights.
    """
    folder = Path(path).expanduser()
    where = f"{key}: {str(folder)!r}"
    if not (folder / "config.json").is_file():
        result = "has no config.json" if folder.is_dir() else "is not a folder"
        raise RecipeError(f"{where} {result}; expected a checkpoint in the transformers layout.")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        if config.model_type not in kinds:
            raise RecipeError(f"{where} is a checkpoint of {config.model_type!r}, expected {' or '.join(kinds)}.")
        with no_progress_bars(logging):
            model, report = auto.from_pretrained(
                folder, config=config, local_files_only=True, dtype="float32", output_loading_info=True
            )
        # Torchvision resizes in another way, and scores must not depend on whether it is installed.
        image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise RecipeError(f"{where} does not load: {error} Fetch the whole checkpoint again.") from error
    if missing := sorted(report["missing_keys"]):
        raise RecipeError(
            f"{where} lacks {len(missing)} weights of a {config.model_type} model, such as {missing[0]!r}. "
            "Fetch the whole checkpoint again, or give one with all heads."
        )
    return Checkpoint(
        kind=config.model_type, model=model.eval().to(device), image_processor=image_processor, tokenizer=tokenizer
    )
