"""transformers' Janus, whose forward also ends in log-probs or the next logits, of texts and of image tokens.

All compute is in the forward of the root: a backend that shards it gathers what the root holds in hooks of that call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers.models.janus import modeling_janus
from unirl.core.errors import RecipeError
from unirl.numerics.tokens.log_probs import output_logits, token_log_probs

__all__ = ["JanusForConditionalGeneration", "Mode"]

Mode = Literal["log_probs", "logits", "hidden", "end", "pixels"]


class JanusForConditionalGeneration(modeling_janus.JanusForConditionalGeneration):
    """Named as in transformers, so that what `save_pretrained` writes is an ordinary checkpoint."""

    output_scale: float = 1.0

    @classmethod
    def is_custom_code(cls) -> bool:
        return False

    def forward(self, *args: Any, mode: Mode | None = None, **settings: Any) -> Any:
        """What transformers gives, or without `mode` None:

        log_probs, hidden, end, logits: see `_of_tokens`.
        pixels: [N, 3, H, W] in [-1, 1] of image tokens [N, L].
        """
        if mode is None:
            return super().forward(*args, **settings)
        if mode == "pixels":
            return self.model.vqmodel.decode(*args)
        return self._of_tokens(mode, *args, **settings)

    def _of_tokens(
        self,
        mode: Mode,
        tokens: Tensor,
        *,
        layout: dict[str, Any],
        is_made: Tensor | None = None,
        guidance: float | None = None,
        is_seen: Tensor | None = None,
        pixels: Tensor | None = None,
        index: Tensor | None = None,
        cache: Any = None,
        end: Callable[[Tensor, Tensor], Any] | None = None,
        **settings: Any,
    ) -> Any:
        """tokens: [B, L] int64.  layout: of transformers' decoder.

        is_made: [B, L] bool, those that are image tokens; they come from the head of images, where given.
        guidance: scale, of rows that are n conditional ones and then their n unconditional ones; None does not guide.
        is_seen: [B, L] bool, what stands for the images `pixels` [N, 3, H, W], in their order.
        index: [T] into the flattened positions of the first n rows.

        log_probs: of `targets` at index, see `token_log_probs`, which takes `settings`.
        hidden: [T, D] last states there.
        end: what `end` makes of the states there and the projection; a bias is a column of the projection.
        logits: [n, V] fp32 after the last token, and the cache behind `cache`.
        """
        embedded = self._embedded(tokens, is_made, is_seen, pixels)
        keeps = mode == "logits"
        outputs = self.model.language_model(inputs_embeds=embedded, past_key_values=cache, use_cache=keeps, **layout)
        states: Tensor = outputs.last_hidden_state
        if keeps:
            hidden, weight, bias = self._projected(states[:, -1], is_made, guidance)
            return output_logits(hidden, weight, bias=bias), outputs.past_key_values
        assert index is not None
        if guidance is not None:
            index = torch.cat([index, index + states.shape[1] * (len(states) // 2)])
        hidden = states.flatten(0, 1)[index]
        if mode == "hidden":
            return hidden
        hidden, weight, bias = self._projected(hidden, is_made, guidance)
        if end is None:
            return token_log_probs(hidden, weight, bias=bias, **settings)
        if bias is not None:
            hidden = torch.cat([hidden, torch.ones_like(hidden[:, :1])], dim=1)
            weight = torch.cat([weight, bias[:, None]], dim=1)
        return end(hidden, weight)

    def _embedded(
        self, tokens: Tensor, is_made: Tensor | None, is_seen: Tensor | None, pixels: Tensor | None
    ) -> Tensor:
        words = tokens if is_made is None else tokens.masked_fill(is_made, 0)
        embedded: Tensor = self.get_input_embeddings()(words)
        if is_made is not None:
            made = self.prepare_embeddings_for_image_generation(tokens.masked_fill(~is_made, 0))
            embedded = torch.where(is_made[..., None], made.to(embedded.dtype), embedded)
        if pixels is not None:
            assert is_seen is not None
            own = self.model.vision_model.embeddings.patch_embedding.weight.dtype
            features: Tensor = cast(Any, self.model).get_image_features(pixels.to(own), return_dict=True).pooler_output
            embedded = embedded.masked_scatter(is_seen[..., None], features.to(embedded.dtype))
        return embedded

    def _projected(
        self, states: Tensor, is_made: Tensor | None, guidance: float | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Inputs [n, D], weight [V, D] and bias [V] of the output projection."""
        if is_made is None:
            return states, _plain(self.lm_head, "lm_head").weight, None
        head: Any = self.model.generation_head
        last = _plain(head.vision_head, "vision_head")
        inner: Tensor = head.activation_fn(head.proj_out(states))
        if guidance is not None:
            # The projection is linear: guided inputs give guided logits. In fp32, for the scale multiplies rounding.
            conditional, unconditional = inner.float().chunk(2)
            inner = unconditional + guidance * (conditional - unconditional)
        return inner, last.weight, last.bias


def _plain(layer: nn.Module, name: str) -> nn.Linear:
    """The layer. An adapter wraps it and shows the weight below: its own part would be left out without a word."""
    if type(layer) is not nn.Linear:
        raise RecipeError(
            f"backend.lora.targets: got {name!r}, but the model computes log-probs from that projection itself and "
            "takes no adapter on it. Leave it out."
        )
    return layer
