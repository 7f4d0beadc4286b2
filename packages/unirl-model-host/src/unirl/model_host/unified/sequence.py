"""The one sequence of a sample that texts and images are generated from, and its conditions.

Bridges import it in the environments of engines too, so it takes no part of a model that trains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor
from unirl.core.errors import RecipeError
from unirl.core.types.array import Ragged
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig, TextSamplingConfig

__all__ = [
    "Block",
    "Frozen",
    "Sampling",
    "SequenceOfSample",
    "check_format",
    "check_length",
    "token_ids",
]

Sampling = TextSamplingConfig | LatentSamplingConfig


@dataclass(frozen=True, kw_only=True)
class Block:
    """An image in a sequence."""

    ref: MediaRef
    kind: str
    """`latent` or `feature`."""


class SequenceOfSample(Protocol):
    """The sequence that a sample's text or image continues."""

    tokens: list[int]
    """Numbers of the vocabulary's size and above stand for inputs other than tokens, such as VAE latents."""
    blocks: list[Block]


class Frozen(Protocol):
    """A model's VAE and ViT: what they make of images never depends on what trains."""

    def encoded(self, sequences: Sequence[Sequence[Block]]) -> dict[str, Ragged]:
        """Conditions of the images in each sequence: name -> a tensor each."""
        ...

    def latents(self, media: Tensor) -> Tensor:
        """Latents of images [N, 3, H, W] fp32 in [-1, 1], the most likely ones."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Images [N, 3, H, W] fp32 in [0, 1]. Differentiable."""
        ...


def check_length(tokens: Sequence[int], text: str, *, longest: int) -> None:
    """Raise RecipeError for a sequence of more tokens than the checkpoint has positions."""
    if len(tokens) >= longest:
        raise RecipeError(
            f"data: prompt {text[:40]!r}... has {len(tokens)} tokens with its images and turns; the checkpoint has "
            f"{longest} positions (max_position_embeddings). Leave it out of the prompt file."
        )


def token_ids(names: Mapping[str, str], vocabulary: Mapping[str, int], *, folder: Path) -> dict[str, int]:
    """Key -> id of the token with this name. Raises RecipeError for a tokenizer that lacks one."""
    if missing := [name for name in names.values() if name not in vocabulary]:
        raise RecipeError(
            f"model.path: the tokenizer in {str(folder)!r} lacks {', '.join(missing)}, which mark texts and images. "
            "Use the checkpoint's own tokenizer."
        )
    return {key: vocabulary[name] for key, name in names.items()}


def check_format(sampling: TextSamplingConfig, inputs: Inputs) -> None:
    """Raise RecipeError for settings of texts that the format of these models does not have."""
    if sampling.thinking is not None:
        raise RecipeError(
            f"sampling.thinking: got {sampling.thinking}, but the format has no such switch. Leave it unset, and ask "
            "for a thought in sampling.system_prompt."
        )
    if not sampling.chat and (sampling.system_prompt or inputs.turns is not None):
        what = "sampling.system_prompt" if sampling.system_prompt else "a stage that continues from others"
        raise RecipeError(f"sampling.chat: got false with {what}, which needs the marks of texts. Set it to true.")
