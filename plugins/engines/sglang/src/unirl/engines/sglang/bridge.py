"""The bridge that a model needs to run in SGLang, named by `ModelSpec.bridges["sglang"]`.

It is imported both in UniRL's process and in SGLang's environment, so at module level it imports only the standard
library and torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor
    from unirl.core.types.array import Ragged
    from unirl.core.types.sampling import LatentSamplingConfig
    from unirl.numerics.media import LoadedImage

__all__ = ["Bridge"]


class Bridge(Protocol):
    """One model in SGLang, whose pipeline encodes, denoises and decodes."""

    @property
    def pipeline(self) -> str:
        """`"module:Class"` of SGLang's pipeline."""
        ...

    @property
    def pipeline_config(self) -> str:
        """`"module:Class"` of its configuration."""
        ...

    @property
    def sampling_params(self) -> str:
        """`"module:Class"` of its sampling parameters."""
        ...

    @property
    def architecture(self) -> str:
        """`_class_name` in the `model_index.json` of checkpoints that it loads."""
        ...

    @property
    def modules(self) -> tuple[str, ...]:
        """Components with the trainable parameters, of which SGLang updates `transformer` and `transformer_2`. Weight
        names are those of the trained module, where those of several begin with the component, except for:"""
        ...

    @property
    def fused(self) -> Mapping[str, tuple[str, ...]]:
        """Last name of a layer fused by SGLang -> last names of its parts, in the order of their outputs."""
        ...

    @property
    def renamed(self) -> Mapping[str, str]:
        """Pattern of a layer's whole name in SGLang -> its name in training, as `re.sub` takes them, before a fused
        layer is split."""
        ...

    @property
    def constants(self) -> Collection[str]:
        """Parameters of those components that are constants in the trained module."""
        ...

    @property
    def num_encoders(self) -> int:
        """Number of text encoders."""
        ...

    @property
    def rounds_timesteps(self) -> bool:
        """Whether the trained model computes timesteps in the dtype of its weights, instead of fp32."""
        ...

    def unfit(self, model: Any) -> str:
        """Why SGLang computes something else than the model as configured; empty if it does not. Called in UniRL's
        process."""
        ...

    def settings(self, model: Any) -> Mapping[str, Any]:
        """Settings of the model's config that `encode_media` reads as `pipeline.unirl_settings`, as JSON values.
        `max_rows`, if present, bounds the rows of a batch. Called in UniRL's process, only for models with
        `ModelSpec.inputs`."""
        ...

    def encoder_lengths(self, tokenizers: Sequence[Any], sampling: LatentSamplingConfig) -> Sequence[int]:
        """Padded number of prompt tokens of each encoder. tokenizers: those of the encoders."""
        ...

    def latent_shape(self, shape: Sequence[int]) -> Sequence[int]:
        """Shape of one latent in training. shape: in SGLang, before packing."""
        ...

    def packed(self, latents: Tensor) -> Tensor:
        """Latents [B, ...] in the training layout -> in the layout of the inputs and outputs of SGLang's
        transformer."""
        ...

    def unpacked(self, packed: Tensor, shape: Sequence[int]) -> Tensor:
        """The inverse of `packed`. shape: of one latent in training."""
        ...

    def conditions(self, arguments: Mapping[str, Any], sampling: LatentSamplingConfig) -> Mapping[str, Tensor]:
        """The model's conditions, by their names in training, from the arguments of a call of SGLang's transformer:
        name -> [B, ...]."""
        ...

    def encode_media(
        self, pipeline: Any, batch: Any, media: Sequence[LoadedImage], sampling: LatentSamplingConfig
    ) -> Mapping[str, Ragged]:
        """Set those fields of SGLang's batch that it denoises with and encodes from media, such as `image_latent`, of
        all of the batch's rows, or of one as the pipeline's configuration repeats them. Returns the conditions of one
        row: name -> [1, ...], or one tensor of any shape in a tuple.

        Called in place of SGLang's stages, before latents are prepared, only for prompts with media; bridges of models
        without `ModelSpec.inputs` leave it out. SGLang runs its stage for prompts before; a pipeline that encodes
        prompts together with images leaves them to this call.

        media: of the prompt's roles, in its order, as `unirl.numerics.media` reads them in training: `load_picture` and
        `load_image` take them like any reference. Raises DataError for those that the model does not take.
        """
        ...
