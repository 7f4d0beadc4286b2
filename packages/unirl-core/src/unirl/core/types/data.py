"""Prompt data: what one prompt of a file holds. The readers are in `unirl.core.data.prompts`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["MediaRef", "Prompt"]


@dataclass(frozen=True, kw_only=True)
class MediaRef:
    """An image, video or audio that a prompt refers to."""

    modality: str
    role: str
    uri: str
    """Absolute path or URL; relative ones are resolved against the prompt file."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One row of a prompt file."""

    prompt_id: str
    text: str
    metadata: Mapping[str, Any]
    media: tuple[MediaRef, ...] = ()
    where: str = field(default="", compare=False)
    """File and line, for errors; "" for a prompt from no file."""
