"""Qwen2.5-VL and Qwen3-VL: one text track, `text`, written about images."""

from __future__ import annotations

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import Miniature, ModelSpec

__all__ = ["QWEN3", "SPEC", "unirl_models"]


def _spec(name: str, *, architecture: str, write: str, build: str) -> ModelSpec:
    return ModelSpec(
        name=name,
        summary=f"{architecture}: text about images, from any checkpoint in the transformers layout",
        build=f"unirl.models.qwen_vl.model:{build}",
        config="unirl.models.qwen_vl.config:QwenVlConfig",
        capabilities={Cap.TEXT_STAGE, Cap.LORA, Cap.CONDITIONS, Cap.LAZY_BUILD},
        tracks={"text": "text"},
        inputs={"text": {"condition": "needs"}},
        trainable="causal_lm",
        lora_targets="unirl.model_host.module_names:trained_attention_layers",
        wrap_blocks="unirl.model_host.module_names:unsplit_blocks",
        tiny=Miniature(
            write=f"unirl.models.qwen_vl.tiny:{write}",
            media="unirl.models.qwen_vl.tiny:media",
            sampling={"max_new_tokens": 8},
            # Two text blocks of four projections; two text and two vision blocks.
            lora_layers=8,
            wrap_blocks=4,
        ),
        reference=f"transformers.{architecture}ForConditionalGeneration",
        text_parity="unirl.conformance.image_text_parity:run",
    )


SPEC = _spec(
    "qwen25-vl",
    architecture="Qwen2_5_VL",
    write="write",
    build="build",
)
QWEN3 = _spec(
    "qwen3-vl",
    architecture="Qwen3VL",
    write="write_qwen3",
    build="build_qwen3",
)


@hookimpl
def unirl_models() -> list[ModelSpec]:
    return [SPEC, QWEN3]
