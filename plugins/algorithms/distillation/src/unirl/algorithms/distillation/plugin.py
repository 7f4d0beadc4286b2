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


DMD2 = AlgorithmSpec(
    name="dmd2",
    summary="Distribution matching: a student of few steps follows the scores of its teacher and of its own samples",
    build="unirl.algorithms.distillation.dmd2:build",
    config="unirl.algorithms.distillation.config:Dmd2Config",
    needs=Needs(track="latent", trajectory="full", reference="policy", fake_score=True, reward="none", staleness="any"),
    proposes={
        "sampling.kernel": "euler",
        "sampling.eta": 0.0,
        "sampling.sde": {"mode": "none"},
        # Of the paper: five steps of the fake score for one of the student.
        "backend.fake_score": {"steps_per_update": 5},
    },
    paper="arXiv 2405.14867",
    reference="unirl.algorithms.distillation.reference:matching_loss",
)


@hookimpl
def unirl_guidances() -> Iterable[str]:
    return ["unirl.algorithms.distillation.guidance:WithNegatives"]


@hookimpl
def unirl_algorithms() -> Iterable[AlgorithmSpec]:
    return [TOKENS, VELOCITIES, DMD2]
