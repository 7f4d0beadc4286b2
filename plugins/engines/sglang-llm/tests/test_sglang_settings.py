"""What is decided before SGLang starts: settings, versions, the environment. None of this needs SGLang."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hosted_engines.plans import reasons_against
from unirl.core.config import TextSamplingConfig
from unirl.core.errors import RecipeError
from unirl.core.request import TextRequest
from unirl.engines.sglang_llm.config import SglangConfig
from unirl.engines.sglang_llm.environment import ENVIRONMENT
from unirl.engines.sglang_llm.settings import cache_bytes, engine_arguments, linear_names, sampling_arguments
from unirl.models.qwen3.model import Qwen3Model

CHECKPOINT = {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "max_position_embeddings": 100,
}


def arguments(tmp_path: Path, *, on_cpu: bool = False, **settings: Any) -> dict[str, Any]:
    (tmp_path / "config.json").write_text(json.dumps(CHECKPOINT), encoding="utf-8")
    return engine_arguments(
        SglangConfig(**settings), folder=tmp_path, dtype=torch.bfloat16, on_cpu=on_cpu, lora_targets=["q_proj"]
    )


def test_a_cpu_has_packages_of_our_own_on_top_of_the_lock_and_a_gpu_has_none() -> None:
    assert [tree.name for tree in ENVIRONMENT.trees("cpu")] == ["torchvision-schemas", "sglang-platform"]
    assert ENVIRONMENT.trees("cuda") == []


def test_settings_become_arguments_of_sglang(tmp_path: Path) -> None:
    found = arguments(tmp_path, max_model_len=50, gpu_memory=0.5, lora_rank=9, port=4000, extra={"page_size": 16})
    # 6 more than is asked for, which SGLang keeps from a prompt with its text.
    assert (found["context_length"], found["mem_fraction_static"], found["page_size"]) == (56, 0.5, 16)
    assert (found["enable_lora"], found["max_lora_rank"], found["lora_target_modules"]) == (True, 9, ["q_proj"])
    assert (found["nccl_port"], found["dtype"], found["device"]) == (4000, "bfloat16", "cuda")
    assert "attention_backend" not in found
    on_cpu = arguments(tmp_path, on_cpu=True)
    assert (on_cpu["context_length"], on_cpu["attention_backend"]) == (106, "torch_native")


def test_the_cache_holds_as_many_tokens_as_its_bytes_do(tmp_path: Path) -> None:
    """Keys and values of 3 layers, 2 heads of 32 / 4 numbers, 2 bytes each: 192 bytes a token."""
    assert cache_bytes(CHECKPOINT, torch.bfloat16) == 192
    assert cache_bytes({**CHECKPOINT, "head_dim": 16}, torch.float32) == 768
    assert arguments(tmp_path, kv_cache_mb=1)["max_total_tokens"] == 2**20 // 192


def test_arguments_that_would_undo_what_is_promised_are_refused(tmp_path: Path) -> None:
    for key, value in (("sampling_backend", "flashinfer"), ("tp_size", 2)):
        with pytest.raises(RecipeError, match=rf"engine\.extra\.{key}: it cannot be given"):
            arguments(tmp_path, extra={key: value})


def test_adapters_may_be_on_the_linear_layers_of_blocks(model: Qwen3Model) -> None:
    """By the names of Qwen3's layers; the output layer is in no block."""
    expected = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert set(linear_names(model)) == expected


def test_a_request_in_the_words_of_sglang() -> None:
    sampling = TextSamplingConfig(temperature=0.7, max_new_tokens=5, stop=["x"])
    wanted = TextRequest(sampling=sampling, prompt_tokens=(torch.tensor([1]),), stop_tokens=(3,), seeds=(4,))
    found = sampling_arguments(wanted)
    assert (found["top_k"], found["stop_token_ids"], found["stop"], found["max_new_tokens"]) == (-1, [3], ["x"], 5)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["backend.trains=lora"], "engine.lora_rank: 0 was asked for, and the backend trains adapters"),
        (["engine.gpu_memory=90"], "engine.gpu_memory: 90.0 was asked for; it is a share"),
    ],
)
def test_plans_that_cannot_work_are_refused_before_anything_starts(words: list[str], reason: str) -> None:
    assert not reasons_against("quickstart-text", "engine=sglang-llm")
    assert reason in "\n".join(reasons_against("quickstart-text", "engine=sglang-llm", *words))
