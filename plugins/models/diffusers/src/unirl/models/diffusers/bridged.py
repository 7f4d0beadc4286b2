"""Which dedicated model runs a checkpoint in an engine that needs a bridge."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unirl.core.plugins.registry import known_parts
from unirl.model_host.model_files import read_json

__all__ = ["BRIDGED", "instead_of"]

_BOTH = ("sglang", "vllm-omni")
_EXPERTS = " of two transformers"
BRIDGED: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "Flux2KleinPipeline": ("flux2-klein", _BOTH),
    "HunyuanVideo15ImageToVideoPipeline": ("hunyuan-video15-i2v", ("vllm-omni",)),
    "HunyuanVideo15Pipeline": ("hunyuan-video15", ("vllm-omni",)),
    "QwenImageEditPipeline": ("qwen-image-edit", _BOTH),
    "QwenImageEditPlusPipeline": ("qwen-image-edit-plus", _BOTH),
    "QwenImagePipeline": ("qwen-image", _BOTH),
    "StableDiffusion3Pipeline": ("sd3", _BOTH),
    "WanImageToVideoPipeline": ("wan21-i2v", _BOTH),
    f"WanImageToVideoPipeline{_EXPERTS}": ("wan22-i2v", _BOTH),
    "WanPipeline": ("wan21", _BOTH),
    f"WanPipeline{_EXPERTS}": ("wan22", _BOTH),
    "ZImagePipeline": ("z-image", _BOTH),
}
"""Pipeline -> the dedicated model that loads its checkpoints, and the engines that it has a bridge for."""


def instead_of(engine: str, *, path: str) -> str:
    """Why model=diffusers cannot run in an engine of `BRIDGED`, and what can, as sentences; empty for other engines.

    path: of the settings; it is read where it is a local folder.
    """
    models = {pipeline: name for pipeline, (name, engines) in BRIDGED.items() if engine in engines}
    if not models:
        return ""
    index = Path(path).expanduser() / "model_index.json"
    why = f"got {engine!r}, which needs a bridge to the model, and model 'diffusers' has none."
    if not index.is_file():
        choices = ", ".join(f"model={name} for {pipeline}" for pipeline, name in models.items())
        return f"{why} Choose by the pipeline of {path!r}: {choices}; for all others engine=trainside."
    pipeline = _pipeline(read_json(index))
    name = models.get(pipeline)
    why = f"{why} {path!r} is a checkpoint of {pipeline!r}"
    if name is None:
        return f"{why}, for which no model of UniRL has a bridge. Choose engine=trainside."
    part = known_parts().part("model", name)
    package = f" (`pip install {part.dist}`)" if part else ""
    # model=diffusers trains one transformer.
    instead = "" if pipeline.endswith(_EXPERTS) else ", or engine=trainside"
    return f"{why}, which model={name} trains and runs in {engine!r}. Choose model={name}{package}{instead}."


def _pipeline(index: Mapping[str, Any]) -> str:
    """The pipeline of a `model_index.json` as in `BRIDGED`."""
    result = str(index.get("_class_name"))
    if (index.get("transformer_2") or [None])[0]:
        return f"{result}{_EXPERTS}"
    # A Wan 2.2 of one transformer, whose timestep is one of each frame.
    return f"{result} with expand_timesteps" if index.get("expand_timesteps") else result
