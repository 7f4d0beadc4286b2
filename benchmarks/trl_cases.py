"""The cases of `trl_step.py`: sizes, their checkpoints, and a score for completions without an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from unirl.quickstart import text_checkpoint_path

LARGER: Mapping[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
}
NEVER = "<|never|>"
"""A token past the embedding, which the model cannot sample: with it as the stop token, every completion reaches the
limit."""


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    prompts: int
    samples: int
    max_new_tokens: int
    ends: bool
    """Completions end at the model's stop token and are scored by their answer; otherwise by their fraction of
    digits."""
    sizes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of a random model; empty takes the quickstart's weights."""


CASES = (
    Case(name="quickstart", prompts=32, samples=8, max_new_tokens=40, ends=True),
    Case(name="fixed length", prompts=32, samples=8, max_new_tokens=40, ends=False),
    Case(name="larger", prompts=4, samples=8, max_new_tokens=48, ends=False, sizes=LARGER),
)


def write_checkpoint(case: Case, folder: Path) -> Path:
    """The quickstart's checkpoint, or a random one with its tokenizer, with the stop token of the case."""
    for file in Path(text_checkpoint_path()).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    if case.sizes:
        torch.manual_seed(0)
        config = Qwen3Config.from_pretrained(
            folder,
            layer_types=["full_attention"] * case.sizes["num_hidden_layers"],
            trust_remote_code=False,
            **case.sizes,
        )
        Qwen3ForCausalLM(config).save_pretrained(folder)
    if not case.ends:
        last = json.loads((folder / "config.json").read_text())["vocab_size"]
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        # Ids past the quickstart's have no token.
        tokenizer["model"]["vocab"] |= {f"<|{number}|>": number for number in range(_size(tokenizer), last)}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        _edit(folder / "generation_config.json", eos_token_id=[last])
        _edit(folder / "config.json", eos_token_id=last)
    return folder


def trl_tokenizer(folder: Path) -> Any:
    """The tokenizer of a written checkpoint for TRL, which takes the stop token from it: that of the checkpoint."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if json.loads((folder / "config.json").read_text())["eos_token_id"] == len(tokenizer):
        tokenizer.add_special_tokens({"eos_token": NEVER})
    return tokenizer


def _size(tokenizer: dict[str, Any]) -> int:
    return len({*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])})


def _edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def share_of_digits(text: str) -> float:
    return sum(letter.isdigit() for letter in text) / max(1, len(text))
