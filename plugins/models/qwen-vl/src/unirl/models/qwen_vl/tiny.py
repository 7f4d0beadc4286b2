"""Random miniature checkpoints in the ordinary layout, and images for them, for tests and the conformance matrix."""

from __future__ import annotations

from unirl.model_host.tokens.image_miniature import (
    CHAT_TEMPLATE,
    image_processor,
    media,
    tokenizer,
    write_qwen3,
    write_qwen25,
)

__all__ = ["CHAT_TEMPLATE", "image_processor", "media", "tokenizer", "write", "write_qwen3"]

write = write_qwen25
