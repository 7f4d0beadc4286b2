"""Any flow-matching pipeline of diffusers: one latent track, `media`."""

from __future__ import annotations

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import Gap, Miniature, ModelSpec

__all__ = ["SPEC", "unirl_models"]

SPEC = ModelSpec(
    name="diffusers",
    summary="Any flow-matching pipeline of diffusers, from text and images to images or videos, from its folder",
    build="unirl.models.diffusers.model:build",
    config="unirl.models.diffusers.config:DiffusersConfig",
    capabilities={Cap.LATENT_STAGE, Cap.LORA, Cap.GUIDANCE, Cap.CONDITIONS, Cap.LAZY_BUILD},
    tracks={"media": "latent"},
    inputs={"media": {"source": "takes", "first_frame": "takes", "condition": "takes"}},
    trainable="transformer",
    verifies_values=True,
    lora_targets="unirl.models.diffusers.layers:lora_targets",
    wrap_blocks="unirl.models.diffusers.layers:wrap_blocks",
    tiny=Miniature(
        write="unirl.models.diffusers.tiny:write",
        sampling={"height": 64, "width": 64, "max_sequence_length": 16},
        # Eight projections in each of two blocks of two streams, three in a block of one.
        lora_layers=19,
        wrap_blocks=3,
    ),
    gaps=(
        Gap(
            claim="inputs-of-one-text-are-not-shared",
            reason="the miniature's pipeline, FLUX.1, takes no images; whether one does depends on the checkpoint",
        ),
    ),
    reference="diffusers.FluxPipeline",
    parity="unirl.models.diffusers.parity:run",
)


@hookimpl
def unirl_models() -> list[ModelSpec]:
    return [SPEC]
