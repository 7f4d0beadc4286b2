"""Checkpoints of HunyuanImage-3.0 in their published layout. Imports nothing heavy: recipes are checked with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from unirl.core.errors import RecipeError
from unirl.model_host.model_files import find_checkpoint, read_json

__all__ = ["CONFIG", "GENERATION", "GROUPS", "WEIGHTS", "Sizes", "find", "has_template", "sizes_of"]

EXAMPLE = "tencent/HunyuanImage-3.0"
CONFIG, GENERATION, WEIGHTS = "config.json", "generation_config.json", "model"
GROUPS = 32
"""Groups of the norms of images."""
_FILES = ("*.json", "*.safetensors", "*.txt", "LICENSE*", "NOTICE*")
_EXPECTED: Mapping[str, Any] = {
    "hidden_act": "silu", "use_qk_norm": True, "use_mixed_mlp_moe": True, "use_cla": False, "use_mla": False,
    "attention_bias": False, "mlp_bias": False, "moe_layer_num_skipped": 0, "tie_word_embeddings": False,
    "patch_size": 1, "img_proj_type": "unet", "norm_type": "rms",
}  # fmt: skip
"""Settings that this module has no other value of."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a checkpoint."""

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    """Width of a head."""
    eps: float
    rope_theta: float
    experts: int
    chosen: tuple[int, ...]
    """Experts of a token, of each layer."""
    inner: tuple[int, ...]
    """Width within an expert, of each layer."""
    shared: tuple[int, ...]
    """Width within the MLP that all tokens take, of each layer."""
    latent: int
    """Channels of latents."""
    patch: int
    """Channels within the ends of latents."""
    vision: int
    """Width of ViT features."""
    vision_depth: int
    """Linear layers between the ViT and the decoder."""


def find(path: str, *, revision: str | None = None) -> Path:
    """The folder of the checkpoint, fetched where it is a hub id. Raises RecipeError for one that cannot be found."""

    def fetch(name: str) -> str:
        hub = import_module("huggingface_hub")
        return hub.snapshot_download(name, revision=revision, allow_patterns=list(_FILES))

    return find_checkpoint(path, layout="published", example=EXAMPLE, fetch=fetch)


def has_template(folder: Path) -> bool:
    """Whether texts have roles, as those of the instructed checkpoints; a base checkpoint continues plain text."""
    file = folder / GENERATION
    return file.is_file() and read_json(file).get("sequence_template", "pretrain") == "instruct"


def sizes_of(folder: Path) -> Sizes:
    """Sizes by config.json. Raises RecipeError, key `model.path`, for a folder in another layout, and for a checkpoint
    of another architecture."""
    if not (folder / CONFIG).is_file():
        raise RecipeError(
            f"model.path: {str(folder)!r} lacks {CONFIG}, expected the published layout of {EXAMPLE!r}. Fetch the "
            "whole checkpoint."
        )
    settings = read_json(folder / CONFIG)
    try:
        for name in ("cfg_distilled", "use_meanflow"):
            if settings.get(name):
                raise ValueError(
                    f"{name} is true: the checkpoint is distilled for few steps, without guidance or along mean "
                    "velocities, which this model does not compute"
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
        raise RecipeError(
            f"model.path: {CONFIG} in {str(folder)!r} lacks {error}, expected that of {EXAMPLE!r}. Choose another "
            "checkpoint."
        ) from error
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
