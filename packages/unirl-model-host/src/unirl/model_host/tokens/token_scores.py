"""Ends of a causal language model's forward: log-probs or the next logits in place of all logits.

All ends lie inside the forward of the module that trains, so that whatever wraps that module (FSDP2 gathers what its
root holds before the forward, and frees it after) has the output projection at hand.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor
from unirl.core.errors import RecipeError
from unirl.numerics.tokens.log_probs import output_logits, token_log_probs
from unirl.numerics.tokens.shared_tokens import OwnTargets, SharedTokens

__all__ = ["TokenScores", "trunk_of"]

_CACHE = "past_key_values"


class TokenScores:
    """Further ends of the forward, mixed into a `...ForCausalLM` or `...ForConditionalGeneration` of transformers.
    Without `targets`, `last_logits` and `end` the forward is that of transformers."""

    output_scale: float = 1.0
    """Factor between the output projection and the logits, see `measured_output_scale`."""
    shared_tokens: SharedTokens | None = None
    """Ranks that share the tokens of each forward with `targets` or `end`."""

    def forward(
        self,
        *args: Any,
        target_index: Tensor | None = None,
        targets: Tensor | None = None,
        temperature: float = 1.0,
        with_entropy: bool = False,
        chunk: int | None = None,
        allowed: Mapping[int, Tensor] | None = None,
        last_logits: bool = False,
        cache: Any = None,
        end: Callable[[Tensor, Tensor], Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Log-probs, next logits, or what transformers gives.

        targets: [T] int64, with target_index [T] into the flattened [B * L] positions: returns log-probs [T] of the
        targets and their entropies [T] or None, see `token_log_probs`, which takes `allowed`.
        last_logits: returns logits [B, V] fp32 after the last position, and the cache, which continues `cache`.
        end: returns what it makes of the hidden states [T, D] at target_index, times `output_scale`, and the output
        projection [V, D].
        """
        if targets is None and not last_logits and end is None:
            plain: Any = super()
            return plain.forward(*args, **kwargs)
        own: Any = self
        head, trunk = _output_projection(own), trunk_of(own)
        scale = self.output_scale
        if targets is None and end is None:
            name = _cache_name(trunk)
            # As transformers' `generate`: models without attention multiply the tokens at hand by the mask.
            if name != _CACHE and kwargs.get("attention_mask") is not None:
                kwargs["attention_mask"] = kwargs["attention_mask"][:, -args[0].shape[1] :]
            outputs = trunk(*args, **kwargs, **{name: cache})
            logits = output_logits(outputs.last_hidden_state[:, -1], head.weight, bias=head.bias)
            if getattr(outputs, name, None) is None:
                raise RecipeError(
                    f"model.path: {type(self).__name__!r} returns no {name!r}, the cache with which a completion "
                    "continues. Choose a checkpoint of another architecture."
                )
            return logits * scale, getattr(outputs, name)
        assert target_index is not None, "targets come with their places"
        settings: dict[str, Any] = {"temperature": temperature / scale, "chunk": chunk, "with_entropy": with_entropy}
        if self.shared_tokens is None:
            hidden: Tensor = trunk(*args, **kwargs).last_hidden_state.flatten(0, 1)[target_index]
            if end is not None:
                return end(hidden * scale, _unbiased(head))
            expected = cast(Tensor, targets)
            return token_log_probs(hidden, head.weight, expected, bias=head.bias, allowed=allowed, **settings)
        tokens: Tensor = args[0]
        part = OwnTargets(target_index, length=tokens.shape[1], mesh=self.shared_tokens.mesh)
        with self.shared_tokens.splitting():
            hidden = part.hidden(trunk(*args, **kwargs).last_hidden_state)
        if targets is None:
            assert end is not None
            return end(part.gather(hidden) * scale, part.whole_use(_unbiased(head)))
        own_allowed = part.allowed(allowed or {})
        scores = token_log_probs(
            hidden, head.weight, targets[part.which], bias=head.bias, allowed=own_allowed, **settings
        )
        log_probs, entropy = (None if one is None else part.gather(one) for one in scores)
        return log_probs, entropy


def trunk_of(causal_lm: Any) -> Any:
    """The module below the output projection; the language model itself where it has none."""
    trunk = causal_lm.base_model
    if trunk is not causal_lm:
        return trunk
    # A few classes name their trunk otherwise than `base_model_prefix`, such as Llama 4.
    model = import_module("transformers").PreTrainedModel
    models = [part for part in causal_lm.children() if isinstance(part, model)]
    return models[0] if len(models) == 1 else causal_lm


def _cache_name(trunk: Any) -> str:
    """The cache's name among the trunk's arguments and outputs; models without attention have one of their own."""
    known = inspect.signature(trunk.forward).parameters
    return next((name for name in (_CACHE, "cache_params", "state") if name in known), _CACHE)


def _output_projection(causal_lm: Any) -> torch.nn.Linear:
    result = causal_lm.get_output_embeddings()
    # An adapter wraps the layer and shows the weight below it: its own part would be left out without a word.
    if type(result) is not torch.nn.Linear:
        raise RecipeError(
            "backend.lora.targets: got 'lm_head', but the model computes log-probs from the output projection "
            "itself and takes no adapter on it. Leave it out."
        )
    return result


def _unbiased(head: torch.nn.Linear) -> Tensor:
    bias = cast("Tensor | None", head.bias)
    if bias is not None:
        raise RecipeError(
            "algorithm: divergences between whole distributions are computed from output projections without a bias, "
            "and the model's has one. Use an algorithm of sampled tokens, such as grpo with kl_coef."
        )
    return head.weight
