"""Parts that this plugin provides. Imported whenever parts are listed, so it imports nothing heavy."""

from __future__ import annotations

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import RewardExample, RewardSpec

__all__ = ["SPEC", "unirl_rewards"]

SPEC = RewardSpec(
    name="symmetry",
    summary="How much an image is its own mirror image",
    build="symmetry_reward.reward:build",
    config="symmetry_reward.config:SymmetryConfig",
    capabilities={Cap.REWARD_SAMPLE, Cap.REWARD_DIFFERENTIABLE},
    scale="1 minus the mean squared difference of mirrored pixels: 1 is a perfect mirror image, 0 its opposite",
    range=(0.0, 1.0),
    # Odd sizes have a middle row and column, which mirror themselves.
    examples=(RewardExample(height=32, width=32), RewardExample(height=15, width=24)),
    media="image",
    parts=("left-right", "top-bottom"),
)


@hookimpl
def unirl_rewards() -> list[RewardSpec]:
    return [SPEC]
