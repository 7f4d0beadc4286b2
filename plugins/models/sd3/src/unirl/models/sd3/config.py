"""What a recipe can set of the sd3 model."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.core.config import PartConfig

__all__ = ["Sd3Config"]


@dataclass
class Sd3Config(PartConfig):
    path: str = "???"
    """Folder in the diffusers layout, or hub id such as `stabilityai/stable-diffusion-3.5-medium`."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; None is its main branch."""
    variant: str | None = None
    """Variant of the weight files, such as `fp16`; None is the plain ones."""
    dtype: str = "float32"
    """Dtype of the transformer's weights and of its inputs: `float32`, `bfloat16` or `float16`."""
    autocast: str | None = None
    """Run the transformer under autocast to this dtype, so that float32 weights stay as masters; None is off."""
    text_dtype: str = "float32"
    """Dtype of the text encoders, and so of the conditions."""
    vae_dtype: str = "float32"
    """Dtype of the VAE. Half precision shows as banding in the images."""
    use_t5: bool = True
    """Load the T5 encoder, if the checkpoint has one; without it its tokens are zeros, as in diffusers."""
    decode_batch: int = 8
    """Images per call of the VAE; 0 decodes all at once."""
