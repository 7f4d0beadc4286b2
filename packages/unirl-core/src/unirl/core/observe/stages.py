"""The stages of a plan as plain data, to record with a run and to draw."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..types.sampling import LatentSamplingConfig

if TYPE_CHECKING:
    from ..specs.plan import Plan

__all__ = ["evaluation_facts", "stage_facts"]

LATENT = ("kernel", "eta", "num_inference_steps", "guidance_scale", "guidance_mode", "height", "width", "frames")
TEXT = ("temperature", "top_p", "top_k", "max_new_tokens")
"""Settings that say how a sample was made."""


def stage_facts(plan: Plan) -> list[dict[str, Any]]:
    """Facts of each stage, parents first: names of its parts, with None for a missing `parent`, `environment` or
    `algorithm`, and its samples per row of the parent or per prompt."""
    return [
        {
            "name": stage.name,
            "parent": stage.parent,
            "samples": stage.samples,
            "medium": stage.medium,
            "learner": stage.learner.name,
            "model": stage.model.name,
            "engine": stage.engine.name,
            "environment": None if stage.environment is None else stage.environment.name,
            "algorithm": None if stage.algorithm is None else stage.algorithm.name,
            "rewards": list(stage.rewards),
            "credit": stage.settings.credit,
        }
        for stage in plan.stages
    ]


def evaluation_facts(plan: Plan) -> dict[str, Any]:
    """How held-out samples are made: settings of `eval`, and under `stages` the sampler of each stage, which differs
    from that of training: `eval.sampling` over `sampling`, without noise unless it says otherwise."""
    return {
        "policy": plan.eval.policy,
        "seed": plan.eval.seed,
        "num_prompts": plan.eval.num_prompts or "all",
        "samples_per_prompt": plan.eval.samples_per_prompt,
        "stages": {
            stage.name: {
                name: getattr(stage.evaluation, name)
                for name in (LATENT if isinstance(stage.evaluation, LatentSamplingConfig) else TEXT)
            }
            for stage in plan.stages
        },
    }
