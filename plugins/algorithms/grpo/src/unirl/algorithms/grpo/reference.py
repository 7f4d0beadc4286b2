"""The loss of GRPO and its relatives once more, token by token from the papers' formulas: what the algorithm is held
against.

It shares no code with the algorithm. fp64 throughout; clarity before speed.
"""

from __future__ import annotations

import math

from unirl.algorithms.grpo.config import GrpoConfig
from unirl.core.reference import TokenLossInputs, TokenMean, clipped_token, token_divergence, token_importance

__all__ = ["loss"]


def loss(config: GrpoConfig, inputs: TokenLossInputs) -> float:
    """The policy loss, plus `kl_coef` times the divergence, less `entropy_coef` times the entropy."""
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
        weight = min(max(math.exp(own), 1 - low), 1 + high)
        value = -weight * advantage * float(inputs.log_probs[row, token])
    else:
        # GSPO, arXiv 2507.18071, equation 7: the geometric mean over the text.
        whole = [float(inputs.log_probs[row, t] - inputs.old_log_probs[row, t]) for t in tokens]
        ratio = math.exp(sum(whole) / len(whole) if config.ratio == "sequence" else own)
        value = clipped_token(config, ratio, advantage)
    return value * token_importance(config, inputs, row, token, tokens)
