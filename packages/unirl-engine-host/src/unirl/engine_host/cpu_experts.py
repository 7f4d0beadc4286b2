"""Experts of vLLM on a CPU that compute with the weights as they were loaded. Runs in the environments of engines."""

# vLLM is in the environments of engines alone, where type checking does not look.
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import linear, silu

__all__ = ["keep_experts"]


def keep_experts() -> None:
    """Keep the weights of fused experts, [E, 2 I, H] gate first and [E, H, I], on a CPU.

    vLLM's kernel computes with packed ones, which replace them, could no longer be read, and are not packed again after
    an update.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    CPUUnquantizedExperts.process_weights_after_loading = _keep
    CPUUnquantizedExperts.apply = _experts


def _keep(_: Any, layer: Any) -> None:
    del layer


def _experts(
    self: Any,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: Any,
    **others: Any,
) -> None:
    """Write each token's sum over its K experts of weight x down(silu(gate) up) into output [T, H]."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    if activation != MoEActivation.SILU or self.w1_bias is not None or others["expert_map"] is not None:
        raise NotImplementedError(f"experts with {activation}, biases or a map are not computed here on a CPU.")
    output.zero_()
    for expert in topk_ids.unique().tolist():
        tokens, places = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = linear(hidden_states[tokens], w1[expert]).chunk(2, dim=-1)
        result = linear(silu(gate) * up, w2[expert])
        output.index_add_(0, tokens, (result * topk_weights[tokens, places, None]).to(output.dtype))
