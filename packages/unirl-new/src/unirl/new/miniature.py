"""The files of a miniature checkpoint, all but the weights, from those of a checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from shutil import copyfile
from typing import Any

from unirl.new.vocabulary import reduce_ids, reduce_vocabulary

__all__ = ["LEVELS", "names_below", "write_language_model", "write_pipeline"]

LEVELS = ("widths", "depth")
"""How much is made smaller, in the order of trial: widths, experts and depth; or depth alone."""
_WEIGHTS = re.compile(r"\.(safetensors|bin|pt|pth|gguf|h5|msgpack|onnx)$|\.index\.json$")
_FILES = re.compile(r"\.(json|jinja|txt|model)$")
_DEPTHS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth")
_MOST = {
    "intermediate_size": 96, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16, "sliding_window": 8, "max_position_embeddings": 1024, "ffn_dim": 96,
}  # fmt: skip
"""Largest values of settings of a language model. Windows shorter than a prompt, so that they matter."""
_WIDTH, _HEAD, _VISION_WIDTH = 64, 32, 32


def write_language_model(source: Path, folder: Path, *, level: str) -> None:
    """Files of `source`, a checkpoint in the transformers layout, with a small config.json and few tokens.

    level: one of `LEVELS`.
    """
    folder.mkdir(parents=True)
    for file in sorted(source.iterdir()):
        if file.is_file() and _FILES.search(file.name) and not _WEIGHTS.search(file.name):
            copyfile(file, folder / file.name)
    ids = reduce_vocabulary(folder)
    for name in ("config.json", "generation_config.json"):
        place = folder / name
        if not place.is_file():
            continue
        settings: dict[str, Any] = json.loads(place.read_text("utf-8"))
        settings.pop("_name_or_path", None)
        if ids:
            settings = reduce_ids(settings, ids)
        if name == "config.json":
            settings = _small(settings, level=level)
        place.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _small(settings: dict[str, Any], *, level: str) -> dict[str, Any]:
    nested = {key: value for key, value in settings.items() if key.endswith("_config") and isinstance(value, dict)}
    text_key = next((key for key in ("text_config", "llm_config") if key in nested), "")
    text = nested.get(text_key, settings)
    width = int(text.get("hidden_size") or 0)
    result = dict(settings)
    for key, value in nested.items():
        if "num_attention_heads" in value or any(name in value for name in _DEPTHS):
            result[key] = _small_part(value, level=level, is_text=key == text_key, text_width=width)
    if not text_key:
        result = _small_part(result, level=level, is_text=True, text_width=width)
    elif level == "widths":
        # Projections between the parts.
        for key, value in result.items():
            if isinstance(value, int) and value == width and re.search(r"(hidden_size|_dim|_width)$", key):
                result[key] = _WIDTH
    return result


def _small_part(part: Mapping[str, Any], *, level: str, is_text: bool, text_width: int) -> dict[str, Any]:
    """One of the networks: a text decoder or an encoder of images."""
    result = dict(part)
    depth_key = next((key for key in _DEPTHS if isinstance(part.get(key), int)), "")
    if depth_key:
        result |= _shallow(part, depth_key)
    if level != "widths":
        return result
    for key, most in _MOST.items():
        if isinstance(part.get(key), int):
            result[key] = min(part[key], most)
    width = _WIDTH if is_text else _VISION_WIDTH
    heads_key = next((key for key in ("num_attention_heads", "num_heads") if part.get(key)), "")
    for key, value in part.items():
        if key in ("hidden_size", "embed_dim", "d_model", "n_embd") and isinstance(value, int):
            result[key] = min(value, width)
        elif key in ("out_hidden_size", "projection_dim") and value == text_width:
            result[key] = _WIDTH
    if not heads_key:
        return result
    heads, keys = int(part[heads_key]), part.get("num_key_value_heads")
    result[heads_key] = min(heads, 4 if is_text else 2)
    if isinstance(keys, int):
        result["num_key_value_heads"] = result[heads_key] if keys == heads else min(keys, result[heads_key] // 2)
    old_head = part.get("head_dim") or int(part.get("hidden_size") or 0) // max(heads, 1)
    if isinstance(part.get("head_dim"), int):
        result["head_dim"] = min(part["head_dim"], _HEAD)
    new_head = result.get("head_dim") or int(result.get("hidden_size") or 0) // result[heads_key]
    for key in ("rope_scaling", "rope_parameters"):
        rope = result.get(key)
        if isinstance(rope, dict) and "mrope_section" in rope and new_head != old_head:
            result[key] = {**rope, "mrope_section": _sections(rope["mrope_section"], new_head // 2)}
    return result


def _shallow(part: Mapping[str, Any], depth_key: str) -> dict[str, Any]:
    """Two layers, of two kinds where there are two, and what the configuration lists for each layer."""
    depth = int(part[depth_key])
    chosen = _layers(part, depth)
    result: dict[str, Any] = {depth_key: len(chosen)}
    for key, value in part.items():
        if not isinstance(value, list):
            continue
        if len(value) == depth and depth > len(chosen):
            result[key] = [value[index] for index in chosen]
        elif value and key.endswith(("_indexes", "_indices", "_layers")) and all(isinstance(v, int) for v in value):
            result[key] = [each for each in value if each < len(chosen)] or [len(chosen) - 1]
    return result


def _layers(part: Mapping[str, Any], depth: int) -> list[int]:
    kinds = part.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == depth:
        other = next((index for index, kind in enumerate(kinds) if kind != kinds[0]), None)
        if other is not None:
            return [0, other]
    return list(range(min(depth, 2)))


def _sections(sections: list[int], total: int) -> list[int]:
    """Pairs of a head along time, height and width, in the same proportions: [16, 24, 24] of 64 is [4, 6, 6] of 16."""
    result = [each * total // sum(sections) for each in sections]
    return [result[0] + total - sum(result), *result[1:]]


def names_below(folder: Path) -> Iterator[str]:
    """Files below a folder, relative to it, sorted."""
    yield from sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def write_pipeline(source: Path, folder: Path, *, level: str) -> None:
    """The same of a checkpoint in the diffusers layout: of each network a small config.json, the rest as it is.

    Channels of latents, heads' sizes and patches stay, so that positions and packing are the checkpoint's.
    """
    for file in sorted(source.rglob("*")):
        if file.is_file() and _FILES.search(file.name) and not _WEIGHTS.search(file.name) and file.name != "README.md":
            place = folder / file.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            copyfile(file, place)
    parts = sorted(path.parent for path in folder.glob("*/config.json"))
    widths: dict[int, int] = {}
    projected: list[tuple[int, int]] = []
    for part in parts:
        if part.name.startswith(("text_encoder", "image_encoder")):
            old = _read(part / "config.json")
            new = _small_encoder(old, level=level)
            tokenizer = folder / part.name.replace("text_encoder", "tokenizer")
            if tokenizer.is_dir() and tokenizer != part and (ids := reduce_vocabulary(tokenizer)):
                new = reduce_ids(new, ids)
            _write(part / "config.json", new)
            widths[_width(old)] = _width(new)
            projected.append((int(old.get("projection_dim") or 0), int(new.get("projection_dim") or 0)))
    if len(projected) > 1:
        widths[sum(old for old, _ in projected)] = sum(new for _, new in projected)
    for part in parts:
        settings = _read(part / "config.json")
        if part.name.startswith("transformer"):
            _write(part / "config.json", _small_transformer(settings, widths, level=level))
        elif part.name == "vae" and level == "widths":
            _write(part / "config.json", _small_vae(settings))


def _small_encoder(settings: Mapping[str, Any], *, level: str) -> dict[str, Any]:
    kind = str(settings.get("model_type"))
    if kind.startswith("clip"):
        result = dict(settings) | _shallow(settings, "num_hidden_layers")
        if level == "widths":
            result |= {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
            result["projection_dim"] = min(int(settings.get("projection_dim") or 16), 16)
        return result
    if "d_model" in settings:
        result = dict(settings) | _shallow(settings, "num_layers")
        if level == "widths":
            result |= {"d_model": min(settings["d_model"], _WIDTH), "d_kv": 16, "d_ff": 96, "num_heads": 2}
        return result
    return _small(dict(settings), level=level)


_OF_TEXT = re.compile(r"joint_attention|cross_attention|cap_feat|caption_channels|text|pooled|context|encoder_hid")


def _small_transformer(settings: Mapping[str, Any], widths: Mapping[int, int], *, level: str) -> dict[str, Any]:
    """A denoiser of two layers of each kind, and of two heads, of the widths of the text encoders."""
    result = dict(settings)
    depths = [key for key in settings if re.search(r"(^|_)(layers|depth)$", key) and isinstance(settings[key], int)]
    for key in depths:
        result |= _shallow(settings, key)
    heads_key = next((key for key in ("num_attention_heads", "n_heads", "num_heads") if settings.get(key)), "")
    if level != "widths" or not heads_key:
        return result
    for key, value in settings.items():
        if isinstance(value, int) and _OF_TEXT.search(key):
            times = next((k for k in (1, 2, 3, 4) if value % k == 0 and value // k in widths), 0)
            result[key] = times * widths[value // times] if times else value
    heads = int(settings[heads_key])
    result[heads_key] = min(heads, 2)
    for key in ("num_kv_heads", "num_key_value_heads", "n_kv_heads"):
        if isinstance(settings.get(key), int):
            result[key] = result[heads_key] if settings[key] == heads else 1
    inner = next((int(settings[key]) for key in ("hidden_size", "dim", "inner_dim") if settings.get(key)), 0)
    inner = inner or heads * int(settings.get("attention_head_dim") or 0)
    for key, value in settings.items():
        if isinstance(value, int) and value == inner and not _OF_TEXT.search(key) and key != heads_key:
            result[key] = inner // heads * result[heads_key]
    if isinstance(settings.get("ffn_dim"), int):
        result["ffn_dim"] = min(settings["ffn_dim"], 96)
    return result


def _small_vae(settings: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(settings)
    if isinstance(channels := settings.get("block_out_channels"), list) and "norm_num_groups" in settings:
        result |= {"block_out_channels": [min(each, 8) for each in channels], "layers_per_block": 1}
        result["norm_num_groups"] = min(settings["norm_num_groups"], 4)
    for key in ("base_dim", "decoder_base_dim"):
        if isinstance(settings.get(key), int):
            result[key] = min(settings[key], 12)
    return result


def _width(settings: Mapping[str, Any]) -> int:
    own = settings.get("text_config") or settings
    return int(own.get("hidden_size") or own.get("d_model") or 0)


def _read(place: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(place.read_text("utf-8"))
    settings.pop("_name_or_path", None)
    return settings


def _write(place: Path, settings: Mapping[str, Any]) -> None:
    place.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
