"""Inputs of a model that generates text and images in one sequence, and the frozen encoders of its images.

Bridges run it in the environments of engines too, so it takes no part of a model that trains.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from unirl.core.roles.absent import absent
from unirl.core.types.array import Ragged
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig

from .sequence import Frozen, Sampling, SequenceOfSample, check_length

__all__ = ["DTYPES_OF_IMAGES", "SequenceEncoder"]

DTYPES_OF_IMAGES = ("vision_dtype", "vae_dtype")
"""Settings of the dtypes of a model's ViT and VAE."""

F = TypeVar("F", bound=Frozen, covariant=True)


class SequenceEncoder(ABC, Generic[F]):
    """Tokenizer, ViT and VAE of a checkpoint. Nothing that it makes depends on weights that train."""

    def __init__(
        self,
        *,
        images: F,
        tokenizer: Any,
        longest: int,
        dtypes: tuple[torch.dtype, torch.dtype],
        device: torch.device,
    ) -> None:
        """longest: positions of the checkpoint.  dtypes: of the ViT and the VAE."""
        self.images, self.tokenizer, self.longest = images, tokenizer, longest
        self.dtypes, self.device = dtypes, device

    @abstractmethod
    def latent_shape(self, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        """Shape of one sample's latent. Raises RecipeError for a size that the checkpoint does not generate."""

    @abstractmethod
    def sequence(self, inputs: Inputs, row: int, sampling: Sampling) -> SequenceOfSample:
        """The sequence of an input, up to what is generated. Raises RecipeError for settings that the format does not
        have."""

    def allowed(self, tokens: Tensor, *, options: Mapping[str, Any]) -> Mapping[int, Tensor]:
        """See `TextModel.allowed`."""
        raise absent(f"model in {type(self).__module__}", self, "allowed", "whose spec states `restricts`")

    @torch.no_grad()
    def encode(self, inputs: Inputs, sampling: LatentSamplingConfig) -> dict[str, Ragged]:
        """Conditions of the images that are generated behind each input: `tokens`, n times [P], and those of
        `Frozen.encoded`. Raises RecipeError for a sequence that is too long, DataError for an image that cannot be
        read."""
        sequences = [self.sequence(inputs, row, sampling) for row in range(inputs.num_rows)]
        for sequence, text in zip(sequences, inputs.texts, strict=True):
            check_length(sequence.tokens, text, longest=self.longest)
        tokens = tuple(torch.tensor(one.tokens, dtype=torch.int64, device=self.device) for one in sequences)
        return {"tokens": tokens, **self.images.encoded([one.blocks for one in sequences])}

    def decode(self, latents: Tensor) -> Tensor:
        """Images [N, 3, H, W] fp32 in [0, 1]. Differentiable."""
        return self.images.decode(latents)

    def tokenized(self, text: str) -> list[int]:
        """Token ids, without special tokens around them."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def texts(self, tokens: Sequence[Tensor]) -> list[str]:
        """Each row's tokens [L] as text, without special tokens."""
        rows: list[Any] = [*tokens]
        return [
            self.tokenizer.decode(row.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for row in rows
        ]
