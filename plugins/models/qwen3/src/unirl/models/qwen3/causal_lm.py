"""The checkpoint's own causal language models, whose forward can also end in log-probs in place of logits."""

from __future__ import annotations

from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe
from unirl.model_host.tokens.token_scores import TokenScores

__all__ = ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"]


class Qwen3ForCausalLM(TokenScores, modeling_qwen3.Qwen3ForCausalLM):
    """Named as in transformers, so that what `save_pretrained` writes is an ordinary checkpoint."""


class Qwen3MoeForCausalLM(TokenScores, modeling_qwen3_moe.Qwen3MoeForCausalLM):
    """Named as in transformers, so that what `save_pretrained` writes is an ordinary checkpoint."""
