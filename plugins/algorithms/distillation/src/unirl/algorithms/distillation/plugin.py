"""Parts that this plugin provides."""

from __future__ import annotations

from collections.abc import Iterable

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Needs
from unirl.core.specs.spec import AlgorithmSpec

TOKENS = AlgorithmSpec(
    name="distillation",
    summary="On-policy distillation of a language model: divergence from a teacher at each token of its own samples",
    build="unirl.algorithms.distillation.tokens:build",
    config="unirl.algorithms.distillation.config:DistillationConfig",
    needs=Needs(track="text", reference="policy", reward="none", staleness="any"),
    paper="arXiv 2306.13649",
    reference="unirl.algorithms.distillation.reference:token_loss",
)

VELOCITIES = AlgorithmSpec(
    name="velocity-distillation",
    summary="On-policy distillation of a diffusion model: velocities matched to a teacher's on its own trajectories",
    build="unirl.algorithms.distillation.velocities:build",
    config="unirl.algorithms.distillation.config:VelocityDistillationConfig",
    needs=Needs(track="latent", reference="policy", reward="none", staleness="any"),
    when={"on_trajectory": Needs(trajectory="full")},
    paper="No paper: the squared error of knowledge distillation (arXiv 1503.02531), of the velocity at each point",
    reference="unirl.algorithms.distillation.reference:velocity_loss",
)


@hookimpl
def unirl_guidances() -> Iterable[str]:
    return ["unirl.algorithms.distillation.guidance:WithNegatives"]


@hookimpl
def unirl_algorithms() -> Iterable[AlgorithmSpec]:
    return [TOKENS, VELOCITIES]
