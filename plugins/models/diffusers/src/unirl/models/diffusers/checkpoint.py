# diffusers exports its classes lazily, which pyright cannot see.
# pyright: reportPrivateImportUsage=false
"""Finding and loading any pipeline in the diffusers layout, with one clear error for each way it can be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging
from unirl.core.errors import RecipeError
from unirl.model_host.diffusion.pipeline_config import pipeline_dtypes
from unirl.model_host.diffusion.pipeline_model import empty_component
from unirl.model_host.lazy_weights import CheckpointValues, weight_files
from unirl.model_host.model_files import (
    check_filled,
    check_parts,
    check_vocabulary,
    find_checkpoint,
    loading_pipeline,
    read_json,
    scheduler_config,
)

import diffusers
from diffusers import DiffusionPipeline
from diffusers.utils import logging as diffusers_logging

from .config import DiffusersConfig

__all__ = ["find", "load_pipeline"]

_EXAMPLE = "black-forest-labs/FLUX.1-dev"
_VOCABULARIES = ("tokenizer.json", "vocab.json", "spiece.model", "tokenizer.model", "vocab.txt")
_SINGLE_FILES = (".safetensors", ".ckpt", ".gguf", ".bin", ".pt", ".pth")


def find(config: DiffusersConfig) -> Path:
    """The folder of the checkpoint, fetched where it is a hub id."""
    if config.path.endswith(_SINGLE_FILES) and Path(config.path).expanduser().is_file():
        raise RecipeError(
            f"model.path: got the single file {config.path!r}, expected a folder in the diffusers layout. Load it with "
            "`from_single_file` of its pipeline in diffusers and write a folder with `save_pretrained`."
        )

    def fetch(name: str) -> str | PathLike[str]:
        return DiffusionPipeline.download(name, revision=config.revision, variant=config.variant, use_safetensors=True)

    return find_checkpoint(config.path, layout="diffusers", example=_EXAMPLE, fetch=fetch)


def load_pipeline(folder: Path, config: DiffusersConfig, *, lazy: bool) -> tuple[Any, CheckpointValues | None]:
    """All components of the checkpoint, each in its dtype, on the CPU; and the values of the transformer, where lazy
    leaves it without.

    Raises RecipeError, key `model.path`, when it is not there, incomplete, or not one of flow matching.
    """
    name, parts = _index(folder)
    check_parts(folder, list(parts))
    _check_files(folder, parts)
    _check_flow(folder)
    encoders = [part for part in parts if part.startswith(("text_encoder", "image_encoder"))]
    dtypes = pipeline_dtypes(config, model="diffusers", encoders=encoders)
    given: dict[str, Any] = {}
    values: CheckpointValues | None = None
    if lazy:
        given["transformer"] = _empty_transformer(folder, parts["transformer"], dtype=dtypes["transformer"])
        files = weight_files(folder / "transformer", "diffusion_pytorch_model", variant=config.variant)
        values = CheckpointValues(given["transformer"], files)
    with loading_pipeline(
        folder, title=name, logs=(diffusers_logging, transformers_logging), errors=(SafetensorError,)
    ):
        # Its own class: DiffusionPipeline loads optional components again that it is given.
        pipeline = getattr(diffusers, name).from_pretrained(
            folder,
            dtype=dtypes,
            variant=config.variant,
            local_files_only=True,
            use_safetensors=True,
            **given,
            trust_remote_code=False,
        )
    check_filled(folder, pipeline.components, given=given)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline, values


def _empty_transformer(folder: Path, part: Sequence[str], *, dtype: Any) -> Any:
    library, kind = part
    cls = getattr(diffusers, kind, None) if library == "diffusers" else None
    if cls is None:
        raise RecipeError(
            f"model.path: {str(folder)!r} has the transformer {library}.{kind}; only those of diffusers "
            f"{diffusers.__version__} are built shard by shard. Train on one process, or choose another release."
        )
    return empty_component(cls, folder / "transformer", dtype=dtype)


def _index(folder: Path) -> tuple[str, dict[str, list[str]]]:
    """Class of the pipeline, and library and class of each component."""
    where = f"model.path: {str(folder)!r}"
    if not (folder / "model_index.json").is_file():
        hint = "Give the folder that holds transformer/, vae/, scheduler/, the tokenizers and the text encoders."
        if (folder / "config.json").is_file():
            names = read_json(folder / "config.json").get("architectures") or []
            if any(each.endswith("ForCausalLM") for each in names):
                hint = f"It is a language model, {names[0]}: use model=causal-lm."
        raise RecipeError(f"{where} has no model_index.json, so it is not in the diffusers layout. {hint}")
    index = read_json(folder / "model_index.json")
    name = index.get("_class_name")
    if not isinstance(name, str) or not isinstance(getattr(diffusers, name, None), type):
        raise RecipeError(
            f"{where} is a checkpoint of {name!r}, which diffusers {diffusers.__version__} does not have. Choose "
            "another checkpoint, or another release of diffusers."
        )
    # Settings may be lists, too.
    parts = {
        key: value
        for key, value in index.items()
        if isinstance(value, list) and len(value) == 2 and all(isinstance(each, str) for each in value)
    }
    if "transformer_2" in parts:
        raise RecipeError(f"{where} has two transformers, for high and for low noise, expected one.")
    if "transformer" not in parts:
        denoiser = next((key for key in ("unet", "prior", "decoder") if key in parts), "none")
        raise RecipeError(
            f"{where} ({name}) has no transformer among its components, its denoiser is {denoiser!r}; expected a "
            "flow-matching pipeline with a transformer."
        )
    return name, parts


def _check_files(folder: Path, parts: dict[str, list[str]]) -> None:
    for part, (_, kind) in parts.items():
        # ByT5's has none: its tokens are bytes.
        if part.startswith("tokenizer") and kind != "ByT5Tokenizer":
            check_vocabulary(folder, _VOCABULARIES, part=part)
        for index in sorted((folder / part).glob("*.index*.json")):
            names = set(read_json(index).get("weight_map", {}).values())
            missing = sorted(name for name in names if not (folder / part / name).is_file())
            if missing:
                raise RecipeError(
                    f"model.path: {str(index)!r} names {len(names)} files, of which {len(missing)} are missing, the "
                    f"first is {missing[0]!r}. Fetch the whole checkpoint."
                )


def _check_flow(folder: Path) -> None:
    settings = scheduler_config(folder)
    name, predicts = str(settings.get("_class_name")), settings.get("prediction_type")
    if name.startswith("FlowMatch") or predicts == "flow_prediction" or settings.get("use_flow_sigmas"):
        return
    what = {"epsilon": "the noise", "v_prediction": "v", "sample": "the clean sample"}.get(
        str(predicts), repr(predicts)
    )
    raise RecipeError(
        f"model.path: {str(folder)!r} has the scheduler {name} with prediction_type {predicts!r}: its model predicts "
        f"{what}, expected a flow-matching model, which predicts a velocity (FlowMatchEulerDiscreteScheduler, or "
        "prediction_type 'flow_prediction'). Choose another checkpoint."
    )
