"""Default bounds of the log-prob mismatch between engine and training model, beyond which a run stops.

Each default is a pair: for every SDE step or token of a rollout, and for the mean over all of them, in nats.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..types.sampling import TextSamplingConfig

if TYPE_CHECKING:
    from ..specs.config import TrainConfig
    from ..specs.plan import Stage

__all__ = ["SIXTEEN_BITS", "TEXT_16_BITS", "TEXT_FP32", "train_settings"]

SIXTEEN_BITS = frozenset({"bf16", "bfloat16", "fp16", "float16", "half"})
"""Dtype settings that make a part compute in 16 bits."""


TEXT_FP32 = (1e-2, 1e-3)
"""Measured between two implementations that sum in different orders: 3e-5 at most, 2e-7 on average. The bounds leave
room for larger models, are too small to matter to a clip range of 0.2, and far below the 0.1 and more that a wrong
temperature, stale weights or shifted tokens cause."""
TEXT_16_BITS = (1.0, 5e-2)
"""bf16 has 8 bits of precision: logits around 20 are 0.125 apart, so tokens are off by 1e-2 on average, and rare ones
by a few tenths. A single token of a long rollout says little; the mean tells rounding from different weights."""


def train_settings(stage: Stage) -> TrainConfig:
    """`train` of a stage, with the default bounds of its track for those that are not set.

    Latents: the algorithm's clip range, so that no log-prob (a mean over a latent) is off by more than the ratio may
    move. Text: the fp32 bounds, or the 16-bit ones where a setting of the model, engine or backend names such a dtype.
    """
    largest, mean = _of_track(stage)
    train = stage.train
    return replace(
        train,
        logp_mismatch_max=largest if train.logp_mismatch_max is None else train.logp_mismatch_max,
        logp_mismatch_mean=mean if train.logp_mismatch_mean is None else train.logp_mismatch_mean,
    )


def _of_track(stage: Stage) -> tuple[float | None, float | None]:
    """Default bounds of the largest and the mean mismatch; None is unbounded."""
    if isinstance(stage.sampling, TextSamplingConfig):
        parts = [choice for kind, choice in stage.parts.items() if kind != "algorithm"]
        values = [value for choice in parts for value in vars(choice.config).values()]
        is_narrow = any(isinstance(value, str) and value in SIXTEEN_BITS for value in values)
        return TEXT_16_BITS if is_narrow else TEXT_FP32
    if stage.algorithm is None or not stage.algorithm.spec.clip_key:
        return None, None
    return float(getattr(stage.algorithm.config, stage.algorithm.spec.clip_key)), None
