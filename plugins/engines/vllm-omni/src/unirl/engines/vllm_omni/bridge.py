"""The bridge that a model needs to run in vLLM-Omni, named by `ModelSpec.bridges["vllm-omni"]`.

It is imported both in UniRL's process and in vLLM-Omni's environment, so at module level it imports only the standard
library and torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor
    from unirl.core.types.sampling import LatentSamplingConfig

__all__ = ["Bridge"]


class Bridge(Protocol):
    """One model in vLLM-Omni. `pipeline` below is vLLM-Omni's, with its own copies of all components.

    Conditions, latents and velocities are those of `unirl.core.roles.DiffusionModel`: same names, layouts and scales.
    """

    @property
    def pipeline(self) -> str:
        """`"module:Class"` of vLLM-Omni's pipeline."""
        ...

    @property
    def architecture(self) -> str:
        """`_class_name` in the `model_index.json` of checkpoints that it loads."""
        ...

    @property
    def module(self) -> str:
        """Attribute of the pipeline with the trainable parameters. Weight names are those of the trained module, except
        for:"""
        ...

    @property
    def fused(self) -> Mapping[str, tuple[str, ...]]:
        """Last name of a layer fused by vLLM-Omni -> last names of its parts, in the order of their outputs. A single
        part is a renamed layer."""
        ...

    def unfit(self, model: Any) -> str:
        """Why vLLM-Omni computes something else than the model as configured; empty if it does not. Called in UniRL's
        process."""
        ...

    def latent_shape(self, pipeline: Any, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        """Shape of one sample's latent."""
        ...

    def encode(self, pipeline: Any, prompt: str, sampling: LatentSamplingConfig) -> Mapping[str, Tensor]:
        """Conditions of one prompt: name -> [1, ...]."""
        ...

    def velocity(self, pipeline: Any, x: Tensor, sigma: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        """x: [B, ...] fp32.  sigma: [B].  conditions: name -> [B, ...].  Returns [B, ...] fp32."""
        ...

    def decode(self, pipeline: Any, latents: Tensor) -> Tensor:
        """Media of latents [N, ...], fp32 in [0, 1]."""
        ...
