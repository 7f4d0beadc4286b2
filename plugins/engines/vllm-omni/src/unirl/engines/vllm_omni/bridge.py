"""The bridge that a model needs to run in vLLM-Omni, named by `ModelSpec.bridges["vllm-omni"]`.

It is imported both in UniRL's process and in vLLM-Omni's environment, so at module level it imports only the standard
library and torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor
    from unirl.core.types.array import Ragged
    from unirl.core.types.inputs import Inputs
    from unirl.core.types.sampling import LatentSamplingConfig
    from unirl.numerics.media import LoadedImage
    from unirl.numerics.tokens.rollout import TokenDecoder

__all__ = ["Bridge", "SequenceBridge", "TextBridge"]


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
    def module(self) -> str | tuple[str, ...]:
        """Attribute of the pipeline with the trainable parameters, or those that together have them: names of weights
        then begin with the attribute's. Otherwise these are those of the trained module, except for:"""
        ...

    @property
    def fused(self) -> Mapping[str, tuple[str, ...]]:
        """End of the name of a layer fused by vLLM-Omni -> ends of the names of its parts, in the order of their
        outputs. A single part is a renamed layer; where the name is a parameter's, such as `norm.gen_weight`, a renamed
        parameter."""
        ...

    def unfit(self, model: Any) -> str:
        """Why vLLM-Omni computes something else than the model as configured; empty if it does not. Called in UniRL's
        process."""
        ...

    def settings(self, model: Any) -> Mapping[str, Any]:
        """Settings of the model's config that `encode_with_media` reads as `pipeline.unirl_settings`, as JSON values.
        Called in UniRL's process, only for models with `ModelSpec.inputs`."""
        ...

    def latent_shape(self, pipeline: Any, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        """Shape of one sample's latent."""
        ...

    def encode(self, pipeline: Any, prompt: str, sampling: LatentSamplingConfig) -> Mapping[str, Tensor]:
        """Conditions of one prompt without media: name -> [1, ...]."""
        ...

    def encode_with_media(
        self, pipeline: Any, prompt: str, media: Sequence[LoadedImage], sampling: LatentSamplingConfig
    ) -> Mapping[str, Ragged]:
        """Conditions of one prompt and its media: name -> [1, ...], or one tensor of any shape in a tuple. Called only
        for models with `ModelSpec.inputs`; other bridges leave it out.

        media: of the prompt's roles, in its order, as `unirl.numerics.media` reads them in training: `load_picture` and
        `load_image` take them like any reference. Raises DataError for those that the model does not take.
        """
        ...

    def velocity(self, pipeline: Any, x: Tensor, sigma: Tensor, conditions: Mapping[str, Any]) -> Tensor:
        """x: [B, ...] fp32.  sigma: [B].  conditions: name -> [B, ...], or B tensors.  Returns [B, ...] fp32."""
        ...

    def decode(self, pipeline: Any, latents: Tensor) -> Tensor:
        """Media of latents [N, ...], fp32 in [0, 1]."""
        ...


@runtime_checkable
class SequenceBridge(Protocol):
    """Further methods of a `Bridge` for a model that continues one sequence (`ModelSpec.continues`). They replace
    `Bridge.encode` and `Bridge.encode_with_media`."""

    def checkpoint(self, model: Any, path: str) -> Path:
        """Folder of the checkpoint in its published layout, which has no `model_index.json`: `path` if set, else that
        of the model. Called in UniRL's process. Raises RecipeError for one in another layout."""
        ...

    def encode_sequence(self, pipeline: Any, inputs: Inputs, sampling: LatentSamplingConfig) -> Mapping[str, Ragged]:
        """Conditions of one row: name -> [1, ...], or one tensor of any shape in a tuple.

        inputs: one row; its media and those of its turns are a `unirl.numerics.media.LoadedImage` each.
        """
        ...

    def prefilled(self, pipeline: Any, conditions: Mapping[str, Ragged]) -> Mapping[str, Ragged]:
        """Arguments of `velocity` in place of these conditions: one entry per row. They may depend on the weights in
        use: they are computed once per batch, and neither stored nor returned. conditions: one entry per row."""
        ...


@runtime_checkable
class TextBridge(Protocol):
    """Further methods of a `Bridge` for a model whose texts vLLM-Omni's pipeline generates too, from the same weights.
    `ModelSpec.bridged_texts` then names the engine."""

    def decoder(self, pipeline: Any) -> TokenDecoder:
        """The model's text track for `unirl.numerics.tokens.rollout.generate_text`, which runs in the engine's worker.

        Its logits are those of `TextModel.next_logits`, of the same prompt tokens and conditions.
        """
        ...

    def max_model_len(self, pipeline: Any) -> int:
        """Positions of the checkpoint, of prompt and completion together."""
        ...
