# diffusers exports its classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false
"""Checkpoints of Wan 2.2 in the diffusers layout."""

from __future__ import annotations

from diffusers import WanPipeline
from unirl.model_host.diffusion.pipeline_files import PipelineFiles

from .config import FROM_TEXT

__all__ = ["FILES", "PARTS", "VOCABULARIES"]

PARTS = ("transformer", "transformer_2", "vae", "text_encoder", "tokenizer", "scheduler")
"""Components without which a checkpoint is incomplete."""
VOCABULARIES = ("tokenizer.json", "spiece.model")
"""Files of a tokenizer, one of which must be there."""

FILES = PipelineFiles(
    pipeline=WanPipeline,
    model="wan22",
    title="Wan 2.2",
    example=FROM_TEXT.example,
    vocabularies=VOCABULARIES,
    check=FROM_TEXT.check,
    parts=PARTS,
    hint=f"{FROM_TEXT.example!r} is in that layout",
    siblings=FROM_TEXT.siblings,
)
