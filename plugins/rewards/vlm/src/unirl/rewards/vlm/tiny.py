"""A judge of random weights in the layout of published checkpoints, for conformance and tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)
from transformers.utils import logging as transformers_logging
from unirl.model_host.model_files import no_progress_bars

if TYPE_CHECKING:
    from .config import HeadConfig

__all__ = ["write", "write_edit_reward", "write_hpsv3"]

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
_VISION = {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 14}
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for part in message.content %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(folder: Path, *, seed: int) -> Mapping[str, Any]:
    """Write a `Qwen2_5_VLForConditionalGeneration` of 0.1 M random parameters; returns the settings that load it."""
    tokenizer = _processor_files(folder)
    model = _scrambled(Qwen2_5_VLForConditionalGeneration, _qwen25_config(tokenizer), seed=seed)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    with no_progress_bars(transformers_logging):
        model.save_pretrained(folder)
    return {"model": str(folder)}


def write_hpsv3(folder: Path, *, seed: int) -> Mapping[str, Any]:
    """Write HPSv3.safetensors for a tiny Qwen2-VL, that base, and an instruction; returns the settings that load them.

    The names of the weights are those of the published file: a state dict of transformers before 4.52.
    """
    from .config import Hpsv3Config

    old = {"model.visual.": "visual.", "model.language_model.": "model."}
    return _write_heads(folder, Hpsv3Config(), Qwen2VLForConditionalGeneration, _qwen2_config, old=old, seed=seed)


def write_edit_reward(folder: Path, *, seed: int) -> Mapping[str, Any]:
    """Write model.safetensors of two heads on a tiny Qwen2.5-VL, that base, and both instructions; returns the settings
    that load them.

    The names of the weights are those of the published file: a state dict of transformers 4.57.
    """
    from .config import EditRewardConfig

    return _write_heads(
        folder, EditRewardConfig(), Qwen2_5_VLForConditionalGeneration, _qwen25_config, old={}, seed=seed
    )


def _write_heads(
    folder: Path,
    settings: HeadConfig,
    cls: Any,
    config_of: Callable[[Any], Any],
    *,
    old: Mapping[str, str],
    seed: int,
) -> Mapping[str, Any]:
    """old: how names of weights began, by how they begin now."""
    from .config import REWARD_TOKEN
    from .preference import head_of

    base = folder / "base"
    tokenizer = _processor_files(base)
    config = config_of(tokenizer)
    # As published, the base has more embeddings than tokens.
    config.text_config.vocab_size = len(tokenizer) + 7
    config.save_pretrained(base)
    config.text_config.vocab_size = len(tokenizer) + 1
    model = _scrambled(cls, config, seed=seed)
    weights: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        start = next((start for start in old if name.startswith(start)), "")
        weights[old.get(start, "") + name.removeprefix(start)] = value.clone()
    result = {"model": str(folder), "base": str(base), "num_pixels": 4 * 28 * 28}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for prefix, setting in settings.heads.items():
            head = head_of(config.text_config.hidden_size)
            weights |= {f"{prefix}.{name}": value for name, value in head.state_dict().items()}
            file = folder / f"{setting}.txt"
            file.write_text(f"How good is this {setting}: {{prompt}}\nRating: {REWARD_TOKEN}", encoding="utf-8")
            result[setting] = str(file)
    save_file(weights, folder / settings.weights)
    return result


def _qwen2_config(tokenizer: Any) -> Any:
    vision = {**_VISION, "embed_dim": 32, "mlp_ratio": 2}
    return Qwen2VLConfig(text_config=_text_config(tokenizer), vision_config=vision, **_token_ids(tokenizer))


def _qwen25_config(tokenizer: Any) -> Any:
    vision = {
        **_VISION,
        "intermediate_size": 48,
        "out_hidden_size": 32,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    }
    return Qwen2_5_VLConfig(text_config=_text_config(tokenizer), vision_config=vision, **_token_ids(tokenizer))


def _processor_files(folder: Path) -> Any:
    """Write image processor, tokenizer (a token a byte, without merges) and chat template; returns the tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    inner.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    inner.add_special_tokens(list(_SPECIAL))
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>", extra_special_tokens=list(_SPECIAL)
    )
    tokenizer.chat_template = _CHAT
    tokenizer.save_pretrained(folder)
    size = {"shortest_edge": 28 * 28, "longest_edge": 8 * 28 * 28}
    Qwen2VLImageProcessorPil(patch_size=14, size=size).save_pretrained(folder)
    return tokenizer


def _text_config(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
        # Time, height and width turn 2, 3 and 3 of the 8 pairs of a head.
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "pad_token_id": None,
    }


def _token_ids(tokenizer: Any) -> dict[str, Any]:
    """Token ids of Qwen-VL's placeholders. Videos are never shown as such; their placeholder is in no text."""
    names = {
        "vision_start_token_id": "vision_start",
        "vision_end_token_id": "vision_end",
        "image_token_id": "image_pad",
    }
    result = {key: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for key, name in names.items()}
    return {**result, "video_token_id": len(tokenizer)}


def _scrambled(cls: Any, config: Any, *, seed: int) -> Any:
    """A model with every weight moved, so that no zero or one of the initialisation hides a term."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cls(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model
