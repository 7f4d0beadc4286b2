"""FLUX.2 [klein]: one latent track, `image`, from text and, if there are any, from source images."""

from __future__ import annotations

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import Gap, Miniature, ModelSpec

__all__ = ["SPEC", "unirl_models"]

SPEC = ModelSpec(
    name="flux2-klein",
    summary="FLUX.2 [klein], text to image and editing of source images, from the diffusers layout",
    build="unirl.models.flux2_klein.model:build",
    config="unirl.models.flux2_klein.config:Flux2KleinConfig",
    capabilities={Cap.LATENT_STAGE, Cap.LORA, Cap.GUIDANCE, Cap.CONDITIONS, Cap.LAZY_BUILD},
    tracks={"image": "latent"},
    inputs={"image": {"source": "takes"}},
    trainable="transformer",
    lora_targets=(
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "attn.to_qkv_mlp_proj",
    ),
    optional_parts=("encode", "decode"),
    adapter_layouts=dict.fromkeys(("comfy", "kohya", "original"), "unirl.models.flux2_klein.adapter_layouts:FLUX2"),
    wrap_blocks=("Flux2TransformerBlock", "Flux2SingleTransformerBlock"),
    tiny=Miniature(
        write="unirl.models.flux2_klein.tiny:write",
        media="unirl.models.flux2_klein.tiny:media",
        sampling={"height": 64, "width": 64, "max_sequence_length": 32},
        # One block of two streams with eight projections, two blocks of one stream with one.
        lora_layers=10,
        wrap_blocks=3,
    ),
    gaps=(
        Gap(
            claim="inputs-of-one-text-are-not-shared",
            reason="the claim's images have 32 x 32 pixels, and the pipeline takes none below 64 x 64",
        ),
        Gap(
            claim="options-on-other-policies-change-the-loss",
            reason="at the step that is trained on, with much noise and a short step under this schedule, a KL penalty "
            "moves the update by 5e-6 of its size; the claim asks for 1e-5",
            only_with=("tempflow-grpo",),
        ),
    ),
    bridges={
        "sglang": "unirl.models.flux2_klein.bridges.sglang:BRIDGE",
        "vllm-omni": "unirl.models.flux2_klein.bridges.vllm_omni:BRIDGE",
    },
    reference="diffusers.Flux2KleinPipeline",
    parity="unirl.models.flux2_klein.parity:run",
)


@hookimpl
def unirl_models() -> list[ModelSpec]:
    return [SPEC]
