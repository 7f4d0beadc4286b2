"""VideoReward of random weights in its published layout, for conformance and tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from .config import DIMENSIONS

__all__ = ["write_videoalign"]

_RANK, _ALPHA = 2, 4
_SPECIAL = ("endoftext", "im_start", "im_end", "vision_start", "vision_end", "vision_pad", "image_pad", "video_pad")
_CHAT = (
    "{% for message in messages %}{% if loop.first and message.role != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message.role }}\n"
    "{% for part in message.content %}"
    "{{ '<|vision_start|><|video_pad|><|vision_end|>' if part.type == 'video' else part.text }}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_videoalign(folder: Path, *, seed: int) -> Mapping[str, Any]:
    """Write model_config.json and checkpoint-10/model.pth, the base that they belong to, and an instruction; returns
    the settings that load them.

    As published, the weights are the state dict of a PEFT model of transformers before 4.52: LoRA on the linear layers
    of the language model, embeddings cut to the tokenizer's length, its own language head.
    """
    base = folder / "base"
    tokenizer = _tokenizer(base)
    config = _config(tokenizer)
    config.save_pretrained(base)
    config.text_config.vocab_size = len(tokenizer) + len(DIMENSIONS)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in Qwen2VLForConditionalGeneration(config).state_dict().items()}
    width = config.text_config.hidden_size
    random = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        old = name.removeprefix("model.") if name.startswith("model.visual.") else name.replace("language_model.", "")
        module, _, kind = f"base_model.model.{old}".rpartition(".")
        is_adapted = module.endswith("_proj") and ".visual." not in module
        state[f"{module}.base_layer.{kind}" if is_adapted else f"{module}.{kind}"] = _noise(random, *shape, kind=kind)
        if is_adapted and kind == "weight":
            state[f"{module}.lora_A.default.weight"] = _noise(random, _RANK, shape[1])
            state[f"{module}.lora_B.default.weight"] = _noise(random, shape[0], _RANK) / 4
    state["base_model.model.rm_head.weight"] = 3 * _noise(random, 1, width)
    (folder / "checkpoint-10").mkdir()
    torch.save(state, folder / "checkpoint-10" / "model.pth")
    data = {"max_frame_pixels": 12 * 28 * 28, "num_frames": None, "fps": 2.0, "eval_dim": ["VQ", "MQ", "TA"]}
    # The means and deviations are those of the published checkpoint.
    numbers = {"VQ": (3.6757, 2.2476), "MQ": (1.1646, 1.3811), "TA": (2.8105, 2.5121)}
    settings = {
        "data_config": {**data, "prompt_template_type": "detailed_special", "sample_type": "uniform"},
        "model_config": {"output_dim": 1, "use_special_tokens": True, "reward_token": "special"},
        "peft_lora_config": {"lora_enable": True, "lora_r": _RANK, "lora_alpha": _ALPHA, "use_rslora": False},
        "inference_config": {
            f"{name}_{kind}": pair[place]
            for name, pair in numbers.items()
            for place, kind in enumerate(("mean", "std"))
        },
    }
    (folder / "model_config.json").write_text(json.dumps(settings), encoding="utf-8")
    instruction = folder / "instruction.txt"
    vq, mq, ta = DIMENSIONS.values()
    instruction.write_text(
        f"\nLooks: {vq}\nMoves: {mq}\nAsked for: {{text_prompt}}\nShows it: {ta}\n", encoding="utf-8"
    )
    files = {"model": str(folder), "base": str(base), "instruction": str(instruction)}
    return {**files, "min_frame_pixels": 4 * 28 * 28}


def _tokenizer(folder: Path) -> Any:
    """A token a byte, and Qwen2-VL's special ones; written with the chat template and preprocessor_config.json."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    special = [f"<|{name}|>" for name in _SPECIAL]
    inner.add_special_tokens(special)
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>", extra_special_tokens=special
    )
    tokenizer.chat_template = _CHAT
    tokenizer.save_pretrained(folder)
    pixels = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
    sizes = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    processor = {"image_processor_type": "Qwen2VLImageProcessor", **pixels, **sizes}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    return tokenizer


def _config(tokenizer: Any) -> Any:
    names = {"vision_start": "vision_start", "vision_end": "vision_end", "image": "image_pad", "video": "video_pad"}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    # Time, height and width turn 2, 3 and 3 of the 8 pairs of a head.
    rotary = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    return Qwen2VLConfig(
        # As published, the base has more embeddings than tokens.
        text_config={**sizes, **ends, "vocab_size": len(tokenizer) + 9, "intermediate_size": 48}
        | {"max_position_embeddings": 4096, "rope_parameters": rotary},
        vision_config={
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 14,
        },
        tie_word_embeddings=False,
        **{f"{key}_token_id": tokenizer.convert_tokens_to_ids(f"<|{name}|>") for key, name in names.items()},
    )


def _noise(random: torch.Generator, *shape: int, kind: str = "weight") -> Tensor:
    """Rows of about length 1; one-dimensional tensors near 1 or 0, so that none hides a term."""
    noise = torch.randn(shape, generator=random)
    if len(shape) == 1:
        return 0.1 * noise + float(kind == "weight")
    return noise / noise[0].numel() ** 0.5
