"""Settings of BranchGRPO. The tree is set where it is sampled: `sampling.sde.branch_steps` and `branch_factor`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unirl.core.limits import Reason, limit
from unirl.core.specs.capability import Cap
from unirl.core.specs.part_config import PartConfig
from unirl.core.types.sampling import LatentSamplingConfig

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["BranchGrpoConfig"]


@dataclass
class BranchGrpoConfig(PartConfig):
    clip_range: float = limit(1e-4, above=0, most=1)
    """Clip range of the ratio. Log-probs are averaged over the latent's elements, so 1e-4 here is a mean shift of 0.026
    standard deviations at 65,536 elements. Use larger values for small latents."""
    clip_range_high: float | None = limit(None, above=0)
    """Upper clip range, if it differs from the lower one."""
    path_weight: float = limit(0.0, least=0)
    """Reward of a path: the mean over the leaves below it with weights exp(path_weight x log-prob of the steps from
    there to the leaf). 0 is the plain mean, the only one that leaves the policy gradient unbiased."""
    keep_leaves: int = limit(0, least=0)
    """Width pruning: `advantage.keep_best` and `advantage.keep_worst` in one number, half of it each, the odd one to
    the best. All samples count in rewards of paths and advantages. 0 keeps what those two keep."""
    skip_steps: list[int] = limit(list[int](), least=0)
    """Depth pruning: stochastic steps that are left out of the update, counted from 0."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Pruning that leaves nothing or too much, and groups that share no path."""
        if self.keep_leaves == 1:
            yield Reason(key=".keep_leaves", text="got 1, expected 2 or more, of high and of low reward; or 0 for all.")
        if plan is None or stage is None or not isinstance(stage.sampling, LatentSamplingConfig):
            return
        if self.keep_leaves and stage.advantage.keep_best + stage.advantage.keep_worst:
            text = (
                f"got {self.keep_leaves}, but advantage.keep_best or keep_worst choose samples already; leave one out."
            )
            yield Reason(key=".keep_leaves", text=text)
        sde, samples = stage.sampling.sde, plan.rows_compared(stage)
        if sde.branch_steps and stage.parent and stage.settings.group == "prompt":
            text = "got 'prompt', whose samples are made from different inputs and share no path; use 'parent'."
            yield Reason(key=f"stages.{stage.name}.group", text=text)
        if sde.branch_steps and sde.train_fraction != 1:
            text = f"got {sde.train_fraction}, expected 1: a tree trains on whole depths; use algorithm.skip_steps."
            yield Reason(key="sampling.sde.train_fraction", text=text)
        if self.keep_leaves >= samples:
            text = f"got {self.keep_leaves}, expected less than the {samples} samples of a group, or 0 for all."
            yield Reason(key=".keep_leaves", text=text)
        steps = sde.known_steps(stage.sampling.num_inference_steps)
        if self.skip_steps and not set(self.skip_steps) < set(steps):
            yield Reason(
                key=".skip_steps",
                text=f"got {self.skip_steps}, expected some but not all of the stochastic steps {steps}."
                if steps
                else f"sampling.sde.mode {sde.mode!r} moves the stochastic steps; use all, fraction or fixed.",
            )
        if self.path_weight and Cap.LOG_PROBS_GAUSSIAN not in stage.engine.spec.capabilities:
            text = f"engine {stage.engine.name!r} gives no log-probs to weigh paths by; set it to 0."
            yield Reason(key=".path_weight", text=text)
