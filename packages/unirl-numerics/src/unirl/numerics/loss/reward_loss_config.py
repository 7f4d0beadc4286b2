"""Settings of losses that backpropagate rewards, shared by every algorithm that has one, with their limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unirl.core.limits import Reason, limit, one_of
from unirl.core.specs.part_config import PartConfig
from unirl.core.types.sampling import LatentSamplingConfig

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["RewardLossConfig", "beyond_schedule", "outside_rectified_flow"]


@dataclass
class RewardLossConfig(PartConfig):
    """An algorithm's config inherits from it."""

    reward_loss: str = one_of("linear", "hinge", "target", default="linear")
    """Loss of a sample with weighted reward R: `linear` is -R; `hinge` is max(reward_target - R, 0), so samples beyond
    the target have no gradient; `target` is |reward_target - R|, which pulls them back."""
    reward_target: float | None = limit(None, least=-1e9, most=1e9)
    """Target of `hinge` and `target`, in the unit of the weighted reward; null with `linear`."""
    loss_scale: float = limit(1.0, above=0)
    """Factor of the loss. AdamW does not see it, except through `max_grad_norm`, weight decay and other stages."""
    checkpointing: bool = True
    """Recompute the activations of each denoise step in the backward pass instead of keeping them."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """A target that is missing, or that nothing reads."""
        if (self.reward_target is None) != (self.reward_loss == "linear"):
            expected = "null, which 'linear' has no use for" if self.reward_loss == "linear" else "a number"
            yield Reason(
                key=".reward_target",
                text=f"got {'null' if self.reward_target is None else self.reward_target} with "
                f"reward_loss={self.reward_loss}, expected {expected}.",
            )


def beyond_schedule(stage: Stage | None, *, reach: int, key: str, got: str) -> Iterator[Reason]:
    """A reason where the steps that a loss needs outnumber those of the schedule.

    reach: steps that it needs.  got: the settings that ask for them, as in `3 with stop_window=2`.
    """
    sampling = None if stage is None else stage.sampling
    if isinstance(sampling, LatentSamplingConfig) and reach > sampling.num_inference_steps:
        count = "steps" if got == str(reach) else f"steps, which reach back {reach}"
        yield Reason(
            key=key,
            text=f"got {got} {count}; expected at most sampling.num_inference_steps={sampling.num_inference_steps}.",
        )


def outside_rectified_flow(stage: Stage | None, *, key: str, advice: str) -> Iterator[Reason]:
    """A reason where latents are noised by the forward process of rectified flow, and the sampler is not of it."""
    sampling = None if stage is None else stage.sampling
    if isinstance(sampling, LatentSamplingConfig) and sampling.kernel == "ddim-eta":
        yield Reason(
            key=key,
            text="got kernel ddim-eta, expected a kernel of rectified flow, whose forward process noises the latents. "
            f"{advice}",
        )
