"""What a model does: it is plain torch, and knows nothing of engines or trainers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..array import Array, Module

if TYPE_CHECKING:
    from ..config import LatentSamplingConfig
    from ..data import MediaRef
    from ..spec import ModelSpec

__all__ = ["DiffusionModel"]


class DiffusionModel(Protocol):
    """A denoiser with its encoders and decoder. Build: `build(config, *, device) -> DiffusionModel`."""

    spec: ModelSpec
    device: Any

    @property
    def trainable(self) -> Module:
        """The module that trains. A backend may wrap its blocks in place, never replace it."""
        ...

    def encode(
        self,
        prompts: Sequence[str],
        *,
        sampling: LatentSamplingConfig,
        media: Sequence[Sequence[MediaRef]] | None = None,
    ) -> Mapping[str, Array]:
        """Conditions of each prompt: name -> [len(prompts), ...]. No gradient."""
        ...

    def velocity(self, x: Array, sigma: Array, conditions: Mapping[str, Array]) -> Array:
        """Velocity x1 - x0 at noise level sigma.

        x: [B, ...] fp32.  sigma: [B] in [0, 1].  conditions: name -> [B, ...].  Returns [B, ...] fp32.
        """
        ...

    def schedule(self, sampling: LatentSamplingConfig) -> Array:
        """Sigmas [T+1], fp32, falling, ending in 0."""
        ...

    def latent_shape(self, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        """Shape of one sample's latent."""
        ...

    def decode(self, latents: Array) -> Array:
        """Media of latents [N, ...]: images [N, 3, H, W] or videos [N, F, 3, H, W], fp32 in [0, 1]."""
        ...
