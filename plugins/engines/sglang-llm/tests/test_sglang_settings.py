"""Settings, versions and the environment, checked before SGLang starts. None of this needs SGLang."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from external_engines.plans import reasons_against
from unirl.core.errors import RecipeError
from unirl.core.types.request import TextRequest
from unirl.core.types.sampling import TextSamplingConfig
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


def arguments(tmp_path: Path, *, on_cpu: bool = False, num_experts: int = 0, **settings: Any) -> dict[str, Any]:
    checkpoint = {**CHECKPOINT, "num_experts": num_experts}
    (tmp_path / "config.json").write_text(json.dumps(checkpoint), encoding="utf-8")
    return engine_arguments(
        SglangConfig(**settings), folder=tmp_path, dtype=torch.bfloat16, on_cpu=on_cpu, lora_targets=["q_proj"]
    )


def test_memory_that_can_be_released_is_allocated_otherwise_on_a_gpu_alone(tmp_path: Path) -> None:
    for switched, on_cpu in ((True, False), (False, False), (True, True)):
        result = arguments(tmp_path, sleep_mode=switched, on_cpu=on_cpu)
        expected = switched and not on_cpu
        assert (result["enable_memory_saver"], result["enable_weights_cpu_backup"]) == (expected, expected)


def test_a_cpu_has_packages_of_our_own_on_top_of_the_lock_and_a_gpu_has_none() -> None:
    assert [tree.name for tree in ENVIRONMENT.trees("cpu")] == ["torchvision-schemas", "sglang-platform"]
    assert ENVIRONMENT.trees("cuda") == []


def test_settings_become_arguments_of_sglang(tmp_path: Path) -> None:
    result = arguments(tmp_path, max_model_len=50, gpu_memory=0.5, lora_rank=9, extra={"page_size": 16})
    # 6 more than is asked for, which SGLang keeps from a prompt with its text.
    assert (result["context_length"], result["mem_fraction_static"], result["page_size"]) == (56, 0.5, 16)
    assert (result["enable_lora"], result["max_lora_rank"], result["lora_target_modules"]) == (True, 9, ["q_proj"])
    assert (result["dtype"], result["device"]) == ("bfloat16", "cuda")
    assert "attention_backend" not in result
    assert not result["enable_deterministic_inference"]
    assert arguments(tmp_path, batch_invariant=True)["enable_deterministic_inference"]
    on_cpu = arguments(tmp_path, on_cpu=True)
    assert (on_cpu["context_length"], on_cpu["attention_backend"]) == (106, "torch_native")
    # The kernel of experts whose weights can be read; a CPU has one.
    assert arguments(tmp_path, num_experts=4)["moe_runner_backend"] == "triton"
    assert "moe_runner_backend" not in {**result, **arguments(tmp_path, on_cpu=True, num_experts=4)}


def test_the_cache_holds_as_many_tokens_as_its_bytes_do(tmp_path: Path) -> None:
    """Keys and values of 3 layers, 2 heads of 32 / 4 numbers, 2 bytes each: 192 bytes a token."""
    assert cache_bytes(CHECKPOINT, torch.bfloat16) == 192
    assert cache_bytes({**CHECKPOINT, "head_dim": 16}, torch.float32) == 768
    assert arguments(tmp_path, kv_cache_mb=1)["max_total_tokens"] == 2**20 // 192


def test_arguments_that_would_undo_what_is_promised_are_refused(tmp_path: Path) -> None:
    for key, value in (("sampling_backend", "flashinfer"), ("tp_size", 2)):
        with pytest.raises(RecipeError, match=rf"engine\.extra\.{key}: not allowed"):
            arguments(tmp_path, extra={key: value})


def test_adapters_may_be_on_the_linear_layers_of_blocks(model: Qwen3Model) -> None:
    """By the names of Qwen3's layers; the output layer is in no block."""
    expected = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert set(linear_names(model)) == expected


def test_a_request_in_the_words_of_sglang() -> None:
    sampling = TextSamplingConfig(temperature=0.7, max_new_tokens=5, stop=["x"])
    expected = TextRequest(sampling=sampling, prompt_tokens=(torch.tensor([1]),), stop_tokens=(3,), seeds=(4,))
    result = sampling_arguments(expected)
    assert (result["top_k"], result["stop_token_ids"], result["stop"], result["max_new_tokens"]) == (-1, [3], ["x"], 5)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["backend.trains=lora"], "engine.lora_rank: got 0, but the backend trains LoRA adapters"),
        (["engine.gpu_memory=90"], "engine.gpu_memory: got 90.0, expected more than 0 and at most 1."),
    ],
)
def test_plans_that_cannot_work_are_refused_before_anything_starts(words: list[str], reason: str) -> None:
    assert not reasons_against("quickstart-text", "engine=sglang-llm")
    assert reason in "\n".join(reasons_against("quickstart-text", "engine=sglang-llm", *words))
