"""Checkpoints of HunyuanImage-3.0 in their published layout."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from unirl.core.errors import RecipeError
from unirl.model_host.model_files import find_checkpoint, read_json

from .config import EXAMPLE, HunyuanImageConfig
from .module import GROUPS, Sizes

__all__ = ["CONFIG", "GENERATION", "WEIGHTS", "find", "has_template", "sizes_of"]

CONFIG, GENERATION, WEIGHTS = "config.json", "generation_config.json", "model"
_FILES = ("*.json", "*.safetensors", "*.txt", "LICENSE*", "NOTICE*")
_EXPECTED: Mapping[str, Any] = {
    "hidden_act": "silu", "use_qk_norm": True, "use_mixed_mlp_moe": True, "use_cla": False, "use_mla": False,
    "attention_bias": False, "mlp_bias": False, "moe_layer_num_skipped": 0, "tie_word_embeddings": False,
    "patch_size": 1, "img_proj_type": "unet", "norm_type": "rms",
}  # fmt: skip
"""Settings that this module has no other value of."""


def find(config: HunyuanImageConfig) -> Path:
    """The folder of the checkpoint, fetched where it is a hub id. Raises RecipeError for one in another layout."""

    def fetch(name: str) -> str:
        hub = import_module("huggingface_hub")
        return hub.snapshot_download(name, revision=config.revision, allow_patterns=list(_FILES))

    folder = find_checkpoint(config.path, layout="published", example=EXAMPLE, fetch=fetch)
    if not (folder / CONFIG).is_file():
        raise RecipeError(
            f"model.path: {str(folder)!r} lacks {CONFIG}, expected the published layout of {EXAMPLE!r}. Fetch the "
            "whole checkpoint."
        )
    return folder


def has_template(folder: Path) -> bool:
    """Whether texts have roles, as those of the instructed checkpoints; a base checkpoint continues plain text."""
    file = folder / GENERATION
    return file.is_file() and read_json(file).get("sequence_template", "pretrain") == "instruct"


def sizes_of(folder: Path) -> Sizes:
    """Sizes by config.json. Raises RecipeError, key `model.path`, for a checkpoint of another architecture."""
    settings = read_json(folder / CONFIG)
    try:
        for name in ("cfg_distilled", "use_meanflow"):
            if settings.get(name):
                raise ValueError(
                    f"{name} is true: the checkpoint is distilled for few steps, without guidance or along mean "
                    "velocities, which this model does not compute. Use the checkpoint that it was distilled from"
                )
        for name, expected in _EXPECTED.items():
            known = (expected, "hf_rms") if name == "norm_type" else (expected,)
            if (value := settings.get(name, expected)) not in known:
                raise ValueError(f"{name} is {value!r}, expected {expected!r}")
        if (kind := (settings.get("rope_scaling") or {}).get("type", "custom")) != "custom":
            raise ValueError(f"rope_scaling.type is {kind!r}, expected 'custom'")
        if (kind := settings["vit_aligner"]["projector_type"]) != "mlp_gelu":
            raise ValueError(f"vit_aligner.projector_type is {kind!r}, expected 'mlp_gelu'")
        layers, heads, experts = (
            settings[name] for name in ("num_hidden_layers", "num_attention_heads", "num_experts")
        )
        inner = _of_layers(settings, "moe_intermediate_size", layers)
        shared = _of_layers(settings, "num_shared_expert", layers)
        result = Sizes(
            vocab=settings["vocab_size"],
            width=settings["hidden_size"],
            layers=layers,
            heads=heads,
            kv_heads=settings["num_key_value_heads"],
            head=settings.get("attention_head_dim") or settings["hidden_size"] // heads,
            eps=settings["rms_norm_eps"],
            rope_theta=settings["rope_theta"],
            experts=max(experts) if isinstance(experts, list) else experts,
            chosen=_of_layers(settings, "moe_topk", layers),
            inner=inner,
            shared=tuple(width * count for width, count in zip(inner, shared, strict=True)),
            latent=settings["vae"]["latent_channels"],
            patch=settings["patch_embed_hidden_dim"],
            vision=settings["vit_aligner"]["input_dim"],
            vision_depth=settings["vit_aligner"]["depth"],
        )
        _check(result)
        return result
    except KeyError as error:
        raise RecipeError(f"model.path: {CONFIG} in {str(folder)!r} lacks {error}. Fetch it again.") from error
    except ValueError as error:
        raise RecipeError(f"model.path: in {CONFIG} of {str(folder)!r}, {error}. Choose another checkpoint.") from error


def _of_layers(settings: Mapping[str, Any], name: str, layers: int) -> tuple[int, ...]:
    """A setting that is one number or a list of one a layer."""
    value = settings[name]
    result = tuple(value) if isinstance(value, list) else (value,) * layers
    if len(result) != layers:
        raise ValueError(f"{name} has {len(result)} entries, expected {layers}, one a layer")
    return result


def _check(sizes: Sizes) -> None:
    if max(sizes.chosen) > sizes.experts:
        raise ValueError(f"moe_topk is {max(sizes.chosen)}, expected at most num_experts, {sizes.experts}")
    if sizes.heads % sizes.kv_heads:
        raise ValueError(f"num_attention_heads is {sizes.heads}, expected a multiple of {sizes.kv_heads} keys")
    if sizes.head % 4:
        raise ValueError(f"attention_head_dim is {sizes.head}, expected a multiple of 4: rows and columns in turns")
    for name, value in (("hidden_size", sizes.width), ("patch_embed_hidden_dim", sizes.patch)):
        if value % GROUPS:
            raise ValueError(f"{name} is {value}, expected a multiple of {GROUPS}, the groups of its norms")
