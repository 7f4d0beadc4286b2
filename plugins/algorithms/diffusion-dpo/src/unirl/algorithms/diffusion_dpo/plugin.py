"""Parts that this plugin provides."""

from __future__ import annotations

from collections.abc import Iterable

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Needs
from unirl.core.specs.overrides import ValueIf
from unirl.core.specs.spec import AlgorithmSpec

DIFFUSION_DPO = AlgorithmSpec(
    name="diffusion-dpo",
    summary="Diffusion-DPO: prefers the best to the worst sample of a prompt, of rollouts or of stored pairs",
    build="unirl.algorithms.diffusion_dpo.algorithm:build",
    config="unirl.algorithms.diffusion_dpo.config:DiffusionDpoConfig",
    needs=Needs(track="latent", reference="policy", staleness="any"),
    # Four prompts in a trial: as many pairs as in a step of published runs, and latents of 1,024 elements.
    trial={"beta": 200.0, "pairs_per_group": 12},
    proposes={
        "sampling.kernel": "dpm2",
        "sampling.eta": 0.0,
        "sampling.sde": {"mode": "none"},
        # A LoRA adapter is switched off instead.
        "backend.reference_copy": ValueIf(value=True, when={"backend.trains": "full"}),
    },
    paper="arXiv 2311.12908",
    reference="unirl.algorithms.diffusion_dpo.reference:loss",
)


@hookimpl
def unirl_algorithms() -> Iterable[AlgorithmSpec]:
    return [DIFFUSION_DPO]
