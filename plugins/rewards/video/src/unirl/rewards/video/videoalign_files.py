"""The files of VideoReward: weights with their LoRA, normalisation, tokenizer."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, Qwen2VLConfig, Qwen2VLModel
from unirl.core.errors import RecipeError
from unirl.model_host.lazy_weights import empty_parameters
from unirl.model_host.model_files import dtype_of, find_checkpoint, read_json
from unirl.model_host.state_dicts import fill, read_tensors

from .config import DIMENSIONS, VideoAlignConfig

__all__ = ["Checkpoint", "load_checkpoint"]

_SETTINGS = "model_config.json"
_PREFIX = "base_model.model."
"""Prefix of every tensor's name: the checkpoint is the state dict of a PEFT model."""
_FIXED = {
    "data_config": {"prompt_template_type": "detailed_special", "sample_type": "uniform", "num_frames": None},
    "model_config": {"use_special_tokens": True},
}
"""Settings that the reward assumes of the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    trunk: Any
    """Qwen2VLModel, frozen, in the dtype of the config."""
    head: Tensor
    """[3, width] fp32: weights for visual quality, motion quality, text alignment."""
    tokenizer: Any
    """With the reward tokens."""
    chat_template: str
    vision: Any
    """Settings of the vision encoder."""
    fps: float
    """Frames per second that the model is shown."""
    max_frame_pixels: int
    mean: tuple[float, ...]
    """[3] of the raw outputs, subtracted."""
    std: tuple[float, ...]
    """[3] of the raw outputs, divided by."""
    pixel_mean: tuple[float, ...]
    pixel_std: tuple[float, ...]


def load_checkpoint(config: VideoAlignConfig, *, key: str) -> Checkpoint:
    """Raises RecipeError, with the setting's key, for files that are missing, damaged or of another model."""
    dtype = dtype_of(config.dtype, key=f"{key}.dtype", model="reward 'videoalign'")
    folder = _folder(config.model, VideoAlignConfig.model, (_SETTINGS, "checkpoint-*/model.pth"), key=f"{key}.model")
    base = _folder(config.base, VideoAlignConfig.base, ("*.json", "*.txt", "*.jinja"), key=f"{key}.base")
    files = sorted(folder.glob("checkpoint-*/model.pth"), key=lambda file: int(file.parent.name.partition("-")[2]))
    if not files:
        raise RecipeError(
            f"{key}.model: {str(folder)!r} has no checkpoint-*/model.pth. Give a folder laid out as "
            f"{VideoAlignConfig.model}."
        )
    settings = _Settings(read_json(folder / _SETTINGS, key=f"{key}.model"), key=f"{key}.model", file=folder / _SETTINGS)
    settings.check_fixed()
    state = _merged(read_tensors(files[-1], key=f"{key}.model"), scale=settings.lora_scale())
    head = state.pop("rm_head.weight", torch.empty(0, 0)).float()
    embeddings = state.get("language_model.embed_tokens.weight", torch.empty(0, 0))
    if head.shape[0] not in (1, len(DIMENSIONS)) or head.shape[1:] != embeddings.shape[1:]:
        raise RecipeError(
            f"{key}.model: {str(files[-1])!r} has a reward head of shape {list(head.shape)} on embeddings of "
            f"{list(embeddings.shape)}, expected [1, width] or [3, width] and [tokens, width]. Give a checkpoint of "
            "VideoReward."
        )
    tokenizer, template = _tokenizer(base, key=f"{key}.base")
    if len(tokenizer) != len(embeddings):
        raise RecipeError(
            f"{key}.base: the tokenizer in {str(base)!r} has {len(tokenizer)} tokens with those of the reward, the "
            f"weights have {len(embeddings)}. Give the base that the checkpoint was trained from."
        )
    model_config = _model_config(base, key=f"{key}.base")
    model_config.text_config.vocab_size = len(embeddings)
    with empty_parameters(torch.float32):
        trunk: Any = Qwen2VLModel(model_config)
    fill(trunk, state, key=f"{key}.model", file=files[-1], dtype=dtype)
    pixels = read_json(base / "preprocessor_config.json", key=f"{key}.base")
    return Checkpoint(
        trunk=trunk.eval().requires_grad_(False),
        head=head.expand(len(DIMENSIONS), -1).contiguous(),
        tokenizer=tokenizer,
        chat_template=template,
        vision=model_config.vision_config,
        fps=settings.number("data_config", "fps"),
        max_frame_pixels=int(settings.number("data_config", "max_frame_pixels")),
        mean=tuple(settings.number("inference_config", f"{name.upper()}_mean", least=-math.inf) for name in DIMENSIONS),
        std=tuple(settings.number("inference_config", f"{name.upper()}_std") for name in DIMENSIONS),
        pixel_mean=tuple(pixels["image_mean"]),
        pixel_std=tuple(pixels["image_std"]),
    )


@dataclass(frozen=True)
class _Settings:
    """model_config.json."""

    values: Mapping[str, Mapping[str, Any]]
    key: str
    file: Path

    def number(self, section: str, name: str, *, least: float = 0.0) -> float:
        """A finite number above `least`."""
        value: Any = self.values.get(section, {}).get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least < value < math.inf:
            raise self._refusal(section, name, "a number" if least == -math.inf else f"a number above {least:g}")
        return float(value)

    def check_fixed(self) -> None:
        for section, expected in _FIXED.items():
            for name, value in expected.items():
                if self.values.get(section, {}).get(name) != value:
                    raise self._refusal(section, name, repr(value))

    def lora_scale(self) -> float:
        """Factor of the product of LoRA's two matrices (PEFT)."""
        lora = self.values.get("peft_lora_config", {})
        if not lora.get("lora_enable"):
            return 0.0
        rank, alpha = (self.number("peft_lora_config", name) for name in ("lora_r", "lora_alpha"))
        return alpha / (math.sqrt(rank) if lora.get("use_rslora") else rank)

    def _refusal(self, section: str, name: str, expected: str) -> RecipeError:
        return RecipeError(
            f"{self.key}: {str(self.file)!r} has {section}.{name} {self.values.get(section, {}).get(name)!r}, expected "
            f"{expected}. Give the published checkpoint; other variants are not supported."
        )


def _merged(state: Mapping[str, Tensor], *, scale: float) -> dict[str, Tensor]:
    """Tensors of Qwen2VLModel and `rm_head.weight` by their names today, LoRA added to the weights in fp32."""
    plain = {name.removeprefix(_PREFIX): value for name, value in state.items() if not name.endswith("lm_head.weight")}
    for name in [name for name in plain if name.endswith(".base_layer.weight")]:
        module = name.removesuffix(".base_layer.weight")
        down, up = (plain.pop(f"{module}.lora_{letter}.default.weight", None) for letter in "AB")
        # One that lacks its LoRA keeps its name, which the model does not know.
        if down is not None and up is not None:
            plain[f"{module}.weight"] = plain.pop(name).float() + scale * (up.float() @ down.float())
    # transformers named the language model's modules otherwise before 4.52.
    return {
        re.sub(r"^model\.", "language_model.", name).replace(".base_layer.bias", ".bias"): value
        for name, value in plain.items()
    }


def _folder(path: str, example: str, files: tuple[str, ...], *, key: str) -> Path:
    def fetch(name: str) -> str:
        return snapshot_download(name, allow_patterns=list(files))

    return find_checkpoint(path, layout="published", example=example, fetch=fetch, key=key)


def _tokenizer(base: Path, *, key: str) -> tuple[Any, str]:
    """With the reward tokens behind its own, and the chat template."""
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(base, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise RecipeError(f"{key}: the tokenizer in {str(base)!r} does not load: {error} Fetch it again.") from error
    tokenizer.add_tokens(list(DIMENSIONS.values()), special_tokens=True)
    # Checkpoints of that time have the template in a separate file as well.
    file = base / "chat_template.json"
    template = read_json(file, key=key)["chat_template"] if file.is_file() else tokenizer.chat_template
    if not template:
        raise RecipeError(f"{key}: {str(base)!r} has no chat template. Give Qwen2-VL-2B-Instruct.")
    return tokenizer, template


def _model_config(base: Path, *, key: str) -> Any:
    try:
        config = AutoConfig.from_pretrained(base, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise RecipeError(
            f"{key}: the configuration in {str(base)!r} does not load: {error} Fetch it again."
        ) from error
    if not isinstance(config, Qwen2VLConfig):
        raise RecipeError(
            f"{key}: {str(base)!r} is a {config.model_type}, expected qwen2_vl. Give Qwen2-VL-2B-Instruct."
        )
    return config
