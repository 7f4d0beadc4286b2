"""Settings of losses over the forward process: where on the line from data to noise they train, and their checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unirl.core.limits import Reason, limit, one_of
from unirl.core.specs.part_config import PartConfig
from unirl.core.types.sampling import LatentSamplingConfig

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["ForwardConfig", "unguided"]


@dataclass
class ForwardConfig(PartConfig):
    num_points: int = limit(4, least=1)
    """Noise levels at which each sample is trained on, drawn anew for each rollout, one in each of as many equal parts
    of the distribution. Each costs one forward with gradient, and one without for each further policy of the loss."""
    point_levels: str = one_of("uniform", "logit-normal", "schedule", default="uniform")
    """Distribution of the noise levels: `uniform` over [0, 1]; `logit-normal`, which prefers the middle, as in the
    training of Stable Diffusion 3; `schedule`, the levels that the sampler visits."""
    point_range: list[float] = limit([0.0, 1.0], least=0, most=1, length=2)
    """Part of that distribution which is drawn from, as two quantiles from clean to noise. `[0.1, 1]` with `schedule`
    and ten steps leaves out the last step, as a timestep fraction below 1 does in published code."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """An empty range, a reference that lives elsewhere, and sampling that has no meaning for clean latents."""
        yield from super().problems(plan, stage)
        first, last = self.point_range
        if not first < last:
            yield Reason(key=".point_range", text=f"got [{first:g}, {last:g}], expected two rising quantiles.")
        if stage is None:
            return
        name = "the algorithm" if stage.algorithm is None else f"algorithm {stage.algorithm.name!r}"
        if plan is not None and plan.has_reference_workers and stage.needs.reference == "policy":
            yield Reason(
                key="launcher.reference",
                text=f"got separate, but {name} asks for the reference policy at new points, on the train ranks. Use "
                "trainside, or switch its KL penalty off.",
            )
        sampling = stage.sampling
        if not isinstance(sampling, LatentSamplingConfig):
            return
        if sampling.sde.train_fraction != 1:
            yield Reason(
                key="sampling.sde.train_fraction",
                text=f"got {sampling.sde.train_fraction}, expected 1: {name} trains on clean latents, not on steps. "
                "Set algorithm.num_points instead.",
            )
        if sampling.kernel == "ddim-eta":
            yield Reason(
                key="sampling.kernel",
                text=f"got ddim-eta, expected a kernel of rectified flow: {name} noises clean latents along straight "
                "lines, which are not the process of this kernel.",
            )


def unguided(stage: Stage | None) -> Iterator[Reason]:
    """A reason against guidance, for losses that compare the policy that sampled with the one that trains."""
    sampling = None if stage is None else stage.sampling
    if stage is None or not isinstance(sampling, LatentSamplingConfig) or not sampling.is_guided:
        return
    name = "the algorithm" if stage.algorithm is None else f"algorithm {stage.algorithm.name!r}"
    key, expected = ("guidance_mode", "'batched'") if sampling.guidance_scale == 1.0 else ("guidance_scale", "1")
    yield Reason(
        key=f"sampling.{key}",
        text=f"got {getattr(sampling, key)}, expected {expected}: {name} trains the velocity without guidance; its "
        "samples must be made without it too.",
    )
