"""The checkpoint's own models, whose forward can also end in log-probs in place of logits."""

from __future__ import annotations

from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl
from unirl.model_host.tokens.token_scores import TokenScores

__all__ = ["Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration"]


class _OfTransformers:
    """A class of transformers with a changed forward. It reads and writes the checkpoints of the class that it is named
    after, in which weights may be named otherwise than in the module."""

    @classmethod
    def is_custom_code(cls) -> bool:
        return False


class Qwen2_5_VLForConditionalGeneration(
    TokenScores, _OfTransformers, modeling_qwen2_5_vl.Qwen2_5_VLForConditionalGeneration
):
    """Named as in transformers, so that what `save_pretrained` writes is an ordinary checkpoint."""


class Qwen3VLForConditionalGeneration(TokenScores, _OfTransformers, modeling_qwen3_vl.Qwen3VLForConditionalGeneration):
    """Named as in transformers, so that what `save_pretrained` writes is an ordinary checkpoint."""
