"""Bounds of the log-prob mismatch between engine and training model, beyond which a run stops."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..types.sampling import TextSamplingConfig

if TYPE_CHECKING:
    from ..specs.config import TrainConfig
    from ..specs.plan import Stage

__all__ = ["SIXTEEN_BITS", "TEXT_16_BITS", "TEXT_FP32", "MismatchBounds", "mismatch_bounds", "train_settings"]

SIXTEEN_BITS = frozenset({"bf16", "bfloat16", "fp16", "float16", "half"})
"""Dtype settings that make a part compute in 16 bits."""


@dataclass(frozen=True, kw_only=True)
class MismatchBounds:
    """Bounds of the log-prob mismatch |engine - recomputed|, in nats; None means no bound."""

    largest: float | None = None
    """For every SDE step or token of a rollout."""
    mean: float | None = None
    """For the mean over all of them."""


TEXT_FP32 = MismatchBounds(largest=1e-2, mean=1e-3)
"""Measured between two implementations that sum in different orders: 3e-5 at most, 2e-7 on average. The bounds leave
room for larger models, are too small to matter to a clip range of 0.2, and far below the 0.1 and more that a wrong
temperature, stale weights or shifted tokens cause."""
TEXT_16_BITS = MismatchBounds(largest=1.0, mean=5e-2)
"""bf16 has 8 bits of precision: logits around 20 are 0.125 apart, so tokens are off by 1e-2 on average, and rare ones
by a few tenths. A single token of a long rollout says little; the mean tells rounding from different weights."""


def mismatch_bounds(stage: Stage) -> MismatchBounds:
    """The bounds of a stage: `train.logp_mismatch_max` and `train.logp_mismatch_mean`, else the default for its track.

    Latents: the algorithm's clip range, so that no log-prob (a mean over a latent) is off by more than the ratio may
    move. Text: the fp32 bounds, or the 16-bit ones where a setting of the model, engine or backend names such a dtype.
    """
    own = _of_track(stage)
    return MismatchBounds(
        largest=own.largest if stage.train.logp_mismatch_max is None else stage.train.logp_mismatch_max,
        mean=own.mean if stage.train.logp_mismatch_mean is None else stage.train.logp_mismatch_mean,
    )


def train_settings(stage: Stage) -> TrainConfig:
    """`train` of a stage, with the default bounds filled in."""
    bounds = mismatch_bounds(stage)
    return replace(stage.train, logp_mismatch_max=bounds.largest, logp_mismatch_mean=bounds.mean)


def _of_track(stage: Stage) -> MismatchBounds:
    if isinstance(stage.sampling, TextSamplingConfig):
        parts = [choice for kind, choice in stage.parts.items() if kind != "algorithm"]
        values = [value for choice in parts for value in vars(choice.config).values()]
        is_narrow = any(isinstance(value, str) and value in SIXTEEN_BITS for value in values)
        return TEXT_16_BITS if is_narrow else TEXT_FP32
    if stage.algorithm is None or not stage.algorithm.spec.clip_key:
        return MismatchBounds()
    return MismatchBounds(largest=float(getattr(stage.algorithm.config, stage.algorithm.spec.clip_key)))
