"""The bridge of a unified model to an engine that computes velocities and logits with a transformer of its own, and all
else with the model's encoder, which its pipeline holds as `unirl_encoder`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ..lazy_weights import default_dtype
from .encoder import DTYPES_OF_IMAGES, SequenceEncoder

if TYPE_CHECKING:
    from unirl.core.types.array import Ragged
    from unirl.core.types.inputs import Inputs
    from unirl.core.types.sampling import LatentSamplingConfig

    from .engine_texts import UnifiedDecoder

__all__ = ["UnifiedBridge", "check_engine", "encoder_in_engine"]

E = TypeVar("E", bound=SequenceEncoder[Any])


class UnifiedBridge(ABC):
    """What bridges of these models have in common. A subclass adds the pipeline, its names of weights, and `velocity`
    behind the keys and values that `prefilled` gives."""

    @abstractmethod
    def decoder(self, pipeline: Any) -> UnifiedDecoder:
        """The engine's transformer as a text track."""

    @abstractmethod
    def check_layout(self, path: str) -> Path:
        """The folder of a checkpoint. Raises RecipeError for one that the model does not read."""

    def unfit(self, model: Any) -> str:
        return ""

    def checkpoint(self, model: Any, path: str) -> Path:
        return self.check_layout(path) if path else model.folder

    def settings(self, model: Any) -> dict[str, Any]:
        dtypes = zip(DTYPES_OF_IMAGES, model.encoder.dtypes, strict=True)
        return {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes}

    def latent_shape(self, pipeline: Any, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        return pipeline.unirl_encoder.latent_shape(sampling)

    def encode_sequence(self, pipeline: Any, inputs: Inputs, sampling: LatentSamplingConfig) -> dict[str, Ragged]:
        return pipeline.unirl_encoder.encode(inputs, sampling)

    @torch.no_grad()
    def prefilled(self, pipeline: Any, conditions: Mapping[str, Any]) -> dict[str, Ragged]:
        """`keys` and `values` n times [layers, P, kv heads, head], and `position` [n], that of the image."""
        decoder = self.decoder(pipeline)
        rows = [
            decoder.filled(dict(zip(conditions, row, strict=True))) for row in zip(*conditions.values(), strict=True)
        ]
        return {
            "keys": tuple(row.keys for row in rows),
            "values": tuple(row.values for row in rows),
            "position": torch.tensor([row.position for row in rows], device=pipeline.device),
        }

    def decode(self, pipeline: Any, latents: Tensor) -> Tensor:
        return pipeline.unirl_encoder.decode(latents)

    def max_model_len(self, pipeline: Any) -> int:
        return pipeline.unirl_encoder.longest


def encoder_in_engine(
    encoder: Callable[..., E], folder: Path, files: Sequence[Path], *, settings: Mapping[str, str], device: torch.device
) -> E:
    """The encoder of a checkpoint in an engine's process. encoder: as `UnifiedModel` takes it.  files: of the weights.
    settings: as the bridge gives them."""
    from ..tokens.causal_lm_files import load_tokenizer

    dtypes = tuple(getattr(torch, settings[name]) for name in DTYPES_OF_IMAGES)
    # Engines make pipelines with their dtype as torch's default.
    with default_dtype(torch.float32):
        # One image at a time bounds the memory.
        return encoder(folder, files=files, tokenizer=load_tokenizer(folder), batch=1, dtypes=dtypes, device=device)


def check_engine(model: str, *, engine: str, release: str, least: tuple[int, int], ranks: int) -> None:
    """Raise RuntimeError for a release before `least`, and for more than one tensor-parallel rank. model, engine: their
    names for messages."""
    if tuple(map(int, release.split(".")[:2])) < least:
        expected = ".".join(map(str, least))
        raise RuntimeError(f"engine.release: got {engine} {release}, expected {expected} for {model}. Leave it empty.")
    if ranks > 1:
        raise RuntimeError(
            f"engine.tensor_parallel: got {ranks}, expected 1 for {model}, whose weights are not split over ranks here."
        )
