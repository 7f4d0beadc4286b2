"""The bridge of a model whose checkpoint is not in the layout of transformers, named by `ModelSpec.bridges["vllm"]`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Bridge"]


class Bridge(Protocol):
    """One model in vLLM, which loads its checkpoint by a class of its own. Called in UniRL's process.

    A model that vLLM reads images of otherwise than training says so in `ModelSpec.text_alone`.
    """

    def checkpoint(self, model: Any, path: str) -> Path:
        """Folder of the checkpoint: `path` if set, else that of the model. Raises RecipeError for one in another
        layout."""
        ...

    def arguments(self, folder: Path) -> Mapping[str, Any]:
        """Further arguments of `vllm.LLM` for the checkpoint in this folder, as JSON values."""
        ...

    def leaves_out(self, name: str) -> bool:
        """Whether vLLM computes no text with the trained weight of this name."""
        ...
