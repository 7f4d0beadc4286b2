"""Loading checkpoints in the transformers layout, with one clear error for each way they can be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL.Image import Image
from safetensors import SafetensorError
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer
from transformers.utils import logging
from unirl.core.errors import RecipeError, RewardFailed
from unirl.model_host.model_files import check_contained, no_progress_bars

__all__ = ["Checkpoint", "load"]

_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model in evaluation mode with its image processor and tokenizer."""

    kind: str
    """Its `model_type`."""
    key: str
    """Key of the setting that names it, for errors."""
    model: Any
    image_processor: Any
    tokenizer: Any

    def tokens(self, texts: list[str]) -> Any:
        """Tokens of the texts, padded to one length. Raises RewardFailed for a text that the model would cut off."""
        config = self.model.config
        limit = getattr(config, "max_text_len", config.text_config.max_position_embeddings)
        tokens = self.tokenizer(texts, padding=True, return_tensors="pt")
        if (result := tokens["input_ids"].shape[1]) > limit:
            raise RewardFailed(
                f"{self.key}: got {result} tokens for {max(texts, key=len)!r}, expected at most {limit}; give the "
                "class a shorter name."
            )
        return tokens.to(self.model.device)

    def pixels(self, images: Sequence[Image]) -> Any:
        """Model inputs that the image processor makes of RGB images."""
        return self.image_processor(list(images), return_tensors="pt").to(self.model.device)


def load(path: str, *, key: str, auto: Any, kinds: Sequence[str], device: Any) -> Checkpoint:
    """Load a checkpoint in fp32 from its folder, never from the network.

    key: of the setting, for errors.  auto: the transformers class that loads the model.  kinds: accepted `model_type`s.
    Raises RecipeError when the folder is absent, holds another kind of model, or lacks files or weights.
    """
    folder = Path(path)
    where = f"{key}: {str(folder)!r}"
    if not (folder / "config.json").is_file():
        result = "has no config.json" if folder.is_dir() else "is not a folder"
        raise RecipeError(f"{where} {result}; expected a checkpoint in the transformers layout.")
    check_contained(folder, key=key)
    # Without one, transformers makes an empty tokenizer, and every class becomes the same tokens.
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        raise RecipeError(
            f"{where} has no vocabulary ({', '.join(_VOCABULARIES)}); copy the tokenizer's files into the folder."
        )
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if config.model_type not in kinds:
            raise RecipeError(f"{where} is a checkpoint of {config.model_type!r}, expected {' or '.join(kinds)}.")
        with no_progress_bars(logging):
            model, report = auto.from_pretrained(
                folder,
                config=config,
                local_files_only=True,
                dtype="float32",
                output_loading_info=True,
                trust_remote_code=False,
            )
        # Torchvision resizes in another way, and scores must not depend on whether it is installed.
        image_processor = AutoImageProcessor.from_pretrained(
            folder, backend="pil", local_files_only=True, trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise RecipeError(f"{where} does not load: {error} Fetch the whole checkpoint again.") from error
    if missing := sorted(report["missing_keys"]):
        raise RecipeError(
            f"{where} lacks {len(missing)} weights of a {config.model_type} model, such as {missing[0]!r}. "
            "Fetch the whole checkpoint again, or give one with all heads."
        )
    return Checkpoint(
        kind=config.model_type,
        key=key,
        model=model.eval().to(device),
        image_processor=image_processor,
        tokenizer=tokenizer,
    )
