"""The factor between a language model's output projection and its logits, measured on its own forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from unirl.core.errors import RecipeError

from .token_scores import trunk_of

__all__ = ["measured_output_scale"]

_SIZE, _WORDS = 8, 5


@torch.no_grad()
def measured_output_scale(causal_lm: Any) -> float:
    """The factor of the logits: Cohere multiplies what the projection gives, Granite and MiniCPM divide it, most take
    it as it is.

    causal_lm: a `...ForCausalLM` of transformers; no weight is read, so that it may be on the meta device. Its own
    forward runs once, with a trunk that gives known states and a projection that is known.

    Raises RecipeError, key `model.path`, for an architecture whose logits are not that product: with several heads, or
    with a layer in between.
    """
    trunk = trunk_of(causal_lm)
    head: Any = causal_lm.get_output_embeddings()
    where = f"model.path: {type(causal_lm).__name__!r}"
    is_linear = isinstance(head, nn.Linear)
    if trunk is causal_lm or not is_linear:
        head_kind = "no" if head is None else f"a {type(head).__name__} as"
        raise RecipeError(
            f"{where} has {'no trunk below its' if is_linear else head_kind} output projection, expected one linear "
            "layer above a trunk: log-probs are computed from it. Choose a checkpoint of another architecture."
        )
    generator = torch.Generator().manual_seed(0)
    states, weight = (torch.randn(size, _SIZE, generator=generator) for size in (3, _WORDS))

    def known_states(*args: Any, **kwargs: Any) -> _Output:
        del args, kwargs
        return _Output(last_hidden_state=states[None])

    def known_projection(input: Tensor) -> Tensor:  # noqa: A002 - as torch names it
        return input.float() @ weight.T

    # Some call the decoder inside their trunk, such as OPT.
    decoder: Any = causal_lm.get_decoder()
    callees = [trunk] if decoder in (None, trunk, causal_lm) else [trunk, decoder]
    for part in callees:
        part.forward = known_states
    head.forward = known_projection
    try:
        tokens = torch.zeros(1, len(states), dtype=torch.int64)
        result: Tensor = causal_lm(tokens, use_cache=False).logits[0].float()
    except (AttributeError, TypeError, KeyError, RuntimeError) as error:
        raise RecipeError(
            f"{where} does more between its trunk and its logits than a projection and a factor, such as one more "
            "layer: log-probs are computed from the projection alone. Choose a checkpoint of another architecture."
        ) from error
    finally:
        for part in (*callees, head):
            del part.forward
    expected = states @ weight.T
    scale = float((result * expected).sum() / expected.square().sum())
    # One product, in fp32 and in another order of sums: 8 terms of order 1.
    gap = float((result - scale * expected).abs().max() / expected.abs().max())
    if not gap < 1e-5:
        raise RecipeError(
            f"{where} computes logits that differ by {gap:.1e} of the largest from its output projection with the "
            f"factor {scale:.4g}; expected a factor alone. Choose a checkpoint of another architecture."
        )
    # Rounding must not give a factor to models that have none.
    return float(f"{scale:.6g}")


class _Output(dict[str, Any]):
    """Answers as an output of transformers does, by attribute, key or number; None for what it has not."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        return tuple(self.values())[key] if isinstance(key, (int, slice)) else self.get(key)
