"""The preference that a prompt file states, as a reward."""

from __future__ import annotations

from typing import Any

import torch
from unirl.core.errors import RewardFailed
from unirl.core.roles import ScoreInput, Scores
from unirl.core.specs.part_config import RewardConfig

from .plugin import SPEC

__all__ = ["PreferenceReward", "build"]

SIDES = SPEC.samples[1]


def build(config: RewardConfig, *, device: Any) -> PreferenceReward:
    return PreferenceReward()


class PreferenceReward:
    """Scores the sides of stored pairs, which the dataset engine gives in this order: preferred, rejected."""

    def score(self, samples: ScoreInput) -> Scores:
        """[N] fp32: 1 for the first sample of a prompt and 0 for its others.

        Raises RewardFailed for a prompt without samples of both roles, and for samples without finite media.
        """
        if samples.media is None:
            raise RewardFailed("reward preference: got samples without media. Set sampling.decode=true.")
        finite = (
            [] if samples.media.kind == "text" else [bool(array.isfinite().all()) for array in samples.media.arrays]
        )
        for row, sample in enumerate(samples.sample_ids):
            roles = [ref.role for ref in samples.inputs.media[row] if ref.role in SIDES]
            if samples.media.kind == "text":
                roles = [role for role in SIDES if role in samples.metadata[row]]
            if sorted(roles) != sorted(SIDES):
                raise RewardFailed(
                    f"reward preference: the prompt of {sample!r} has stored samples of the roles {roles or 'none'}, "
                    "expected one 'preferred' and one 'rejected'. Use it with engine=dataset."
                )
            if finite and not finite[row]:
                raise RewardFailed(f"reward preference: sample {sample!r} has values that are not finite.")
        return Scores(values=torch.tensor([float(sample.rpartition("/")[2] == "0") for sample in samples.sample_ids]))

    def close(self) -> None:
        """Nothing is held."""
