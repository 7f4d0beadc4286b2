"""How far the log-probs of an engine may be from those of the model that trains before a run stops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .config import TextSamplingConfig

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["SIXTEEN_BITS", "TEXT_16_BITS", "TEXT_FP32", "GapBounds", "gap_bounds"]

SIXTEEN_BITS = frozenset({"bf16", "bfloat16", "fp16", "float16", "half"})
"""Values of settings that make a part compute in 16 bits."""


@dataclass(frozen=True, kw_only=True)
class GapBounds:
    """Bounds of |log-prob of the engine - of the replay|, in nats; None is none."""

    largest: float | None = None
    """Of any SDE step or token of a rollout."""
    mean: float | None = None
    """Over all of them."""


TEXT_FP32 = GapBounds(largest=1e-2, mean=1e-3)
"""Two programs that add fp32 numbers in different orders were 3e-5 apart at most, and 2e-7 on average. The bounds leave
room for larger models, are too small to matter to a clip of 0.2, and far below what a wrong temperature, stale weights
or shifted tokens make, which is 0.1 and more."""
TEXT_16_BITS = GapBounds(largest=1.0, mean=5e-2)
"""bf16 has 8 bits: logits around 20 are 0.125 apart, so tokens are off by 1e-2 on average, and rare ones by some
tenths. One token in a long rollout says little; the mean tells rounding from weights that are not the same."""


def gap_bounds(plan: Plan) -> GapBounds:
    """The bounds of a run: `train.logp_gap_max` and `train.logp_gap_mean`, else what fits its tracks.

    Latents: the clip range of the algorithm: no log-prob, a mean over a latent, is off by more than the ratio may move.
    Texts: those of fp32, or of 16 bits where a setting of the model, the engine or the backend names such a dtype.
    """
    own = _of_tracks(plan)
    return GapBounds(
        largest=own.largest if plan.train.logp_gap_max is None else plan.train.logp_gap_max,
        mean=own.mean if plan.train.logp_gap_mean is None else plan.train.logp_gap_mean,
    )


def _of_tracks(plan: Plan) -> GapBounds:
    if plan.sampling and all(isinstance(sampling, TextSamplingConfig) for sampling in plan.sampling.values()):
        values = [value for choice in (plan.model, plan.engine, plan.backend) for value in vars(choice.config).values()]
        is_narrow = any(isinstance(value, str) and value in SIXTEEN_BITS for value in values)
        return TEXT_16_BITS if is_narrow else TEXT_FP32
    key = plan.algorithm.spec.clip_key
    return GapBounds(largest=float(getattr(plan.algorithm.config, key)) if key else None)
