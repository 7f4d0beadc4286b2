"""Checkpoints of BAGEL in their published layout. Imports nothing heavy: recipes are checked with them."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from math import isqrt
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from unirl.core.errors import RecipeError
from unirl.model_host.model_files import find_checkpoint, read_json

__all__ = ["CONFIG", "LANGUAGE", "VAE", "VISION", "WEIGHTS", "Sizes", "check_layout", "find", "sizes_of"]

EXAMPLE = "ByteDance-Seed/BAGEL-7B-MoT"
CONFIG, LANGUAGE, VISION = "config.json", "llm_config.json", "vit_config.json"
WEIGHTS, VAE = "ema", "ae.safetensors"
"""Stem of the files of all weights but the VAE's, and their file."""
_TABLES = ("latent_pos_embed.pos_embed", "vit_pos_embed.pos_embed")
_FILES = (CONFIG, LANGUAGE, VISION, f"{WEIGHTS}.safetensors*", VAE, "*token*.json", "vocab.json", "merges.txt")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a checkpoint."""

    vocab: int
    width: int
    inner: int
    """Width within the MLPs."""
    layers: int
    heads: int
    kv_heads: int
    eps: float
    rope_theta: float
    latent: int
    """Numbers of a latent token: a patch of the VAE's latents."""
    latent_side: int
    """Largest side of an image, in latent tokens."""
    vision: int
    """Width of ViT features."""
    vision_side: int
    """Largest side of an image, in ViT patches."""
    connector_act: str


def find(path: str, *, revision: str | None = None) -> Path:
    """The folder of the checkpoint, fetched where it is a hub id. Raises RecipeError for one in another layout."""

    def fetch(name: str) -> str:
        hub = import_module("huggingface_hub")
        return hub.snapshot_download(name, revision=revision, allow_patterns=list(_FILES))

    folder = find_checkpoint(path, layout="published", example=EXAMPLE, fetch=fetch)
    check_layout(folder)
    return folder


def check_layout(folder: Path) -> None:
    """Raise RecipeError, key `model.path`, for a folder in another layout, and for settings that this module has no
    other value of."""
    if missing := [name for name in (CONFIG, LANGUAGE, VISION, VAE) if not (folder / name).is_file()]:
        raise RecipeError(
            f"model.path: {str(folder)!r} lacks {', '.join(missing)}, expected the published layout of {EXAMPLE!r}. "
            "Fetch the whole checkpoint."
        )
    settings, language = (read_json(folder / name) for name in (CONFIG, LANGUAGE))
    with _refused(folder):
        if language.get("rope_scaling"):
            raise ValueError(f"rope_scaling of {LANGUAGE} is {language['rope_scaling']!r}, expected none")
        if (act := language.get("hidden_act", "silu")) != "silu":
            raise ValueError(f"hidden_act of {LANGUAGE} is {act!r}, expected 'silu'")
        if (act := settings.get("connector_act", "gelu_pytorch_tanh")) not in ("gelu_pytorch_tanh", "gelu"):
            raise ValueError(f"connector_act of {CONFIG} is {act!r}, expected 'gelu_pytorch_tanh' or 'gelu'")
        if settings.get("interpolate_pos"):
            raise ValueError(f"interpolate_pos of {CONFIG} is true, expected false")


def sizes_of(folder: Path) -> Sizes:
    """Sizes by the configs; those of the tables of places by the weights, for the published code sets them itself.

    As in that code, queries and keys have norms and the output projection its own weights, whatever llm_config.json
    says. Raises RecipeError, key `model.path`.
    """
    settings, language, vision = (read_json(folder / name) for name in (CONFIG, LANGUAGE, VISION))
    with _refused(folder):
        sides = _sides(folder)
        return Sizes(
            vocab=language["vocab_size"],
            width=language["hidden_size"],
            inner=language["intermediate_size"],
            layers=language["num_hidden_layers"],
            heads=language["num_attention_heads"],
            kv_heads=language["num_key_value_heads"],
            eps=language["rms_norm_eps"],
            rope_theta=language["rope_theta"],
            latent=settings["vae_config"]["z_channels"] * settings.get("latent_patch_size", 2) ** 2,
            latent_side=sides[_TABLES[0]],
            vision=vision["hidden_size"],
            vision_side=sides[_TABLES[1]],
            connector_act=settings.get("connector_act", "gelu_pytorch_tanh"),
        )


@contextmanager
def _refused(folder: Path) -> Generator[None]:
    try:
        yield
    except KeyError as error:
        raise RecipeError(f"model.path: the configs in {str(folder)!r} lack {error}. Fetch them again.") from error
    except ValueError as error:
        raise RecipeError(f"model.path: in {str(folder)!r}, {error}. Choose another checkpoint.") from error


def _sides(folder: Path) -> Mapping[str, int]:
    """Sides of the tables of places."""
    from unirl.model_host.lazy_weights import weight_files  # imports torch

    result: dict[str, int] = {}
    for file in weight_files(folder, WEIGHTS):
        try:
            opened: Any
            with safe_open(file, framework="pt") as opened:
                for name in set(opened.keys()) & set(_TABLES):
                    result[name] = isqrt(opened.get_slice(name).get_shape()[0])
        except (OSError, SafetensorError) as error:
            raise RecipeError(f"model.path: {str(file)!r} cannot be read: {error} Fetch it again.") from error
    return result
