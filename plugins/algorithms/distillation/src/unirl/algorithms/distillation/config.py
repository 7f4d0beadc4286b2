"""Settings of distillation from a teacher, of tokens, of velocities and to fewer steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from unirl.core.limits import Reason, limit, one_of
from unirl.core.specs.part_config import PartConfig
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.numerics.forward_config import ForwardConfig, unguided

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["DistillationConfig", "Dmd2Config", "VelocityDistillationConfig"]


@dataclass
class DistillationConfig(PartConfig):
    divergence: str = one_of("reverse", "forward", "jensen", default="reverse")
    """With the student's distribution p and the teacher's q: `reverse` KL(p || q), which seeks the teacher's modes and
    suits a smaller student; `forward` KL(q || p), which covers all that the teacher does; `jensen`, the generalised
    Jensen-Shannon divergence, which lies between them by `beta`."""
    beta: float = limit(0.5, above=0, below=1)
    """Teacher's weight in the mixture of `jensen`. Towards 0 it behaves like `forward`, towards 1 like `reverse`, and
    becomes small: GKD tries 0.1, 0.5 and 0.9."""
    top_k: int | None = limit(None, least=1)
    """Compare this many tokens one by one, the teacher's likeliest at each position, and all others together as one
    outcome. That is a true divergence, of two distributions over top_k + 1 outcomes. None compares every token of the
    vocabulary, in the same memory and with little more work."""
    aggregation: str = one_of("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", default="seq-mean-token-mean")
    """How divergences of tokens are aggregated. `seq-mean-token-mean`: mean over each completion, then over
    completions, as in GKD; `token-mean`: mean over all tokens; `seq-mean-token-sum`: sum over each completion."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """A beta that nothing reads, and a stage without a teacher."""
        if self.beta != 0.5 and self.divergence != "jensen":
            yield Reason(
                key=".beta",
                text=f"got {self.beta:g}, but divergence {self.divergence!r} has no mixture. Leave it out, or set "
                "algorithm.divergence=jensen.",
            )
        yield from _without_teacher(plan, stage)


@dataclass
class VelocityDistillationConfig(ForwardConfig):
    on_trajectory: bool = True
    """Match velocities at latents that the sampler passed. False: on the lines from the final latents to new noise, as
    in training on data; then the samples may also be stored ones (`engine=dataset`)."""
    num_points: int = limit(4, least=1)
    """Points at which each sample is trained on, one in each of as many equal parts of the schedule, drawn anew for
    each rollout. Each costs a forward with gradient, and one of the teacher without."""
    point_levels: str = one_of("uniform", "logit-normal", "schedule", default="schedule")
    """Distribution of the noise levels: `schedule`, those that the sampler visits; `uniform` over [0, 1];
    `logit-normal`, which prefers the middle. The last two without `on_trajectory`."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Also noise levels off the trajectory, and a stage without a teacher."""
        yield from super().problems(plan, stage)
        if self.on_trajectory and self.point_levels != "schedule":
            yield Reason(
                key=".point_levels",
                text=f"got {self.point_levels!r}, expected 'schedule': a trajectory has the levels of its schedule. Or "
                "set algorithm.on_trajectory=false.",
            )
        yield from _without_teacher(plan, stage)


@dataclass
class Dmd2Config(ForwardConfig):
    num_points: int = limit(1, least=1)
    """Steps of each trajectory that are trained on, one drawn in each of as many equal parts of the schedule. Each
    costs a forward of the student with gradient, one of the teacher and one of the fake score; and for each step of the
    fake score one with gradient and one without."""
    point_levels: str = one_of("uniform", "logit-normal", "schedule", default="uniform")
    """Distribution of the noise levels at which teacher and fake score are compared, and the fake score learns:
    `uniform` over [0, 1]; `logit-normal`, which prefers the middle; `schedule`, those that the sampler visits."""
    point_range: list[float] = limit([0.02, 0.98], least=0, most=1, length=2)
    """Part of that distribution which is drawn from, as two quantiles from clean to noise."""

    @property
    def steps(self) -> Self:
        """The same points over the whole schedule, for the student's steps."""
        return replace(self, point_range=[0.0, 1.0])

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Also samples made with guidance, and evaluation with more steps than the student learns."""
        yield from super().problems(plan, stage)
        sampling, evaluation = (None, None) if stage is None else (stage.sampling, stage.evaluation)
        if not isinstance(sampling, LatentSamplingConfig) or not isinstance(evaluation, LatentSamplingConfig):
            return
        # Without a scale a guidance may bring negative conditions for the teacher.
        if sampling.guidance_scale != 1.0:
            yield from unguided(stage)
        steps, evaluated = sampling.num_inference_steps, evaluation.num_inference_steps
        if evaluated > steps:
            yield Reason(
                key="eval.sampling.num_inference_steps",
                text=f"got {evaluated}, expected at most {steps}, the steps that the student learns: it is trained at "
                "no other noise levels.",
            )


def _without_teacher(plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
    """A reason against the initial weights as the teacher of the only stage that trains them: nothing would move,
    unless the teacher has a guidance."""
    if plan is None or stage is None or stage.teachers or stage.algorithm is None:
        return
    if stage.settings.reference_guidance is not None:
        return
    if [each.name for each in plan.trained if each.learner.name == stage.learner.name] == [stage.name]:
        yield Reason(
            key=stage.algorithm.key,
            text=f"algorithm {stage.algorithm.name!r} has no teacher: from its own initial weights a model learns "
            f"nothing. Add a frozen model and name it, stages.{stage.name}.reference=teacher; see "
            "docs/how-to/several-models.md.",
        )
