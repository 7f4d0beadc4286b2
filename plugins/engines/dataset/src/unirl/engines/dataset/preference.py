"""The preference that a prompt file states, as a reward."""

from __future__ import annotations

from typing import Any

import torch
from unirl.core.errors import RewardFailed
from unirl.core.roles import ScoreInput, Scores
from unirl.core.specs.config import RewardConfig

__all__ = ["PreferenceReward", "build"]

VALUES = {"preferred": 1.0, "rejected": 0.0}


def build(config: RewardConfig, *, device: Any) -> PreferenceReward:
    return PreferenceReward()


class PreferenceReward:
    """Scores by `metadata["role"]`, which the dataset engine gives to each of its samples."""

    def score(self, samples: ScoreInput) -> Scores:
        """[N] fp32 of 1 and 0. Raises RewardFailed for a sample of another role, or of none."""
        roles = [str(metadata.get("role")) for metadata in samples.metadata]
        for sample, role in zip(samples.sample_ids, roles, strict=True):
            if role not in VALUES:
                raise RewardFailed(
                    f"reward preference: sample {sample!r} has the role {role!r}, expected preferred or rejected. Use "
                    "it with engine=dataset, on prompts that have media of both roles."
                )
        return Scores(values=torch.tensor([VALUES[role] for role in roles]))

    def close(self) -> None:
        """Nothing is held."""
