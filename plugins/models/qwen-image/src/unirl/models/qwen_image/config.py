"""What a recipe can set of the qwen-image model."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.core.config import PartConfig

__all__ = ["QwenImageConfig"]


@dataclass
class QwenImageConfig(PartConfig):
    path: str = "???"
    """Folder in the diffusers layout, or hub id such as `Qwen/Qwen-Image`."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; None is its main branch."""
    variant: str | None = None
    """Variant of the weight files, such as `fp16`; None is the plain ones."""
    dtype: str = "float32"
    """Dtype of the transformer's weights and of its inputs: `float32`, `bfloat16` or `float16`."""
    autocast: str | None = None
    """Run the transformer under autocast to this dtype, so that float32 weights stay as masters; None is off."""
    text_dtype: str = "float32"
    """Dtype of the Qwen2.5-VL text encoder, and so of the conditions."""
    vae_dtype: str = "float32"
    """Dtype of the VAE. Half precision shows as banding in the images."""
    decode_batch: int = 8
    """Images per call of the VAE; 0 decodes all at once."""
