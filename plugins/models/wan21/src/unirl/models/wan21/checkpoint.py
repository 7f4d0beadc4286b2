# diffusers exports its classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false
"""Checkpoints of Wan 2.1 in the diffusers layout."""

from __future__ import annotations

from diffusers import WanPipeline
from unirl.model_host.diffusion.pipeline_files import PipelineFiles

from .config import FROM_TEXT

__all__ = ["FILES", "VOCABULARIES"]

VOCABULARIES = ("tokenizer.json", "spiece.model")
"""Files of a tokenizer, one of which must be there."""

FILES = PipelineFiles(
    pipeline=WanPipeline,
    model="wan21",
    title="Wan 2.1",
    example=FROM_TEXT.example,
    vocabularies=VOCABULARIES,
    check=FROM_TEXT.check,
    hint=f"{FROM_TEXT.example!r} is in that layout",
    siblings=FROM_TEXT.siblings,
)
