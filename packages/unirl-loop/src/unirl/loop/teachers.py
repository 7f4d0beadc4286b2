"""Teachers: models of a plan that are the reference policy of a stage of another model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from unirl.core.errors import PlanRejected
from unirl.core.roles import diffusion_model, text_model
from unirl.core.types.sampling import LatentSamplingConfig

if TYPE_CHECKING:
    from unirl.core.roles import Model
    from unirl.core.specs.plan import Learner, Plan, Stage

__all__ = ["check_teachers"]


def check_teachers(plan: Plan, models: Mapping[str, Model]) -> None:
    """Raise PlanRejected for a teacher of another vocabulary or latent shape, which only loaded models show."""
    for stage in plan.stages:
        for teacher in stage.teachers:
            _check(stage, teacher, models)


def _check(stage: Stage, learner: Learner, models: Mapping[str, Model]) -> None:
    key = f"stages.{stage.name}.{'reference' if stage.settings.reference else 'teachers'}"
    student, teacher = models[stage.learner.name], models[learner.name]
    if isinstance(stage.sampling, LatentSamplingConfig):
        expected, got = (diffusion_model(model).latent_shape(stage.sampling) for model in (student, teacher))
        mismatch = "" if got == expected else f"latents of shape {list(got)}, expected {list(expected)}"
    else:
        own, other = (text_model(model).vocabulary for model in (student, teacher))
        # Sorted: every rank names the same token.
        different = sorted(token for token, _ in own.items() ^ other.items())
        mismatch = f"a vocabulary of {len(other)} tokens, expected the {len(own)}" if different else ""
        mismatch += f" with equal ids (differs at {different[0]!r})" if different else ""
    if mismatch:
        raise PlanRejected(
            f"{key}: {learner.name!r} has {mismatch} of {stage.learner.name!r}, whose samples it is to score. Choose a "
            "checkpoint of the same family."
        )
