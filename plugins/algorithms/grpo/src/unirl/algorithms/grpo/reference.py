"""Reference implementation of the losses of GRPO and its relatives, token by token from the papers' formulas, for
conformance tests.

It shares no code with the algorithm. fp64 throughout; clarity before speed.
"""

from __future__ import annotations

import math

from unirl.algorithms.grpo.config import GrpoConfig
from unirl.conformance.reference import TokenLossInputs, TokenMean, clipped_token, token_divergence, token_importance

__all__ = ["loss"]


def loss(config: GrpoConfig, inputs: TokenLossInputs) -> float:
    """The policy loss, plus `kl_coef` times the KL, minus `entropy_coef` times the entropy."""
    horizon = config.horizon or config.max_length
    policy, kl, entropy = (TokenMean(config.aggregation, horizon=horizon) for _ in range(3))
    for row, weight in enumerate(inputs.weights):
        tokens = [token for token, counts in enumerate(inputs.valid[row]) if counts]
        if weight == 0 or not tokens or (config.truncated == "mask" and inputs.is_truncated[row]):
            continue
        if inputs.advantages[row] != 0 or not config.drop_zero_advantage:
            policy.add([_policy(config, inputs, row, token, tokens) for token in tokens], float(weight))
        if config.kl_coef:
            kl.add([token_divergence(config, inputs, row, token) for token in tokens], float(weight))
        entropy.add([float(inputs.entropy[row, token]) for token in tokens], float(weight))
    return policy.value + config.kl_coef * kl.value - config.entropy_coef * entropy.value


def _policy(config: GrpoConfig, inputs: TokenLossInputs, row: int, token: int, tokens: list[int]) -> float:
    """The loss of one token, to be minimised."""
    advantage = float(inputs.advantages[row])
    own = float(inputs.log_probs[row, token] - inputs.old_log_probs[row, token])
    if config.loss == "cispo":
        # CISPO, arXiv 2506.13585, equations 4 and 5.
        low, high = config.clip_bounds
        fixed = float(inputs.detached.log_probs[row, token] - inputs.old_log_probs[row, token])
        weight = min(max(math.exp(fixed), 1 - low), 1 + high)
        value = -weight * advantage * float(inputs.log_probs[row, token])
    else:
        whole = sum(float(inputs.log_probs[row, t] - inputs.old_log_probs[row, t]) for t in tokens)
        # GSPO, arXiv 2507.18071, equation 7: the geometric mean over the completion.
        log_ratio = {"token": own, "sequence": whole / len(tokens), "completion": whole}[config.ratio]
        value = clipped_token(config, math.exp(log_ratio), advantage)
        if config.ratio == "completion":  # one loss per completion, divided equally among its tokens
            value /= len(tokens)
    return value * token_importance(config, inputs, row, token, tokens)
