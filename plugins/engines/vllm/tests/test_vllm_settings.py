"""Settings, versions and the environment, checked before vLLM starts. None of this needs vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from external_engines.plans import reasons_against
from unirl.core.errors import RecipeError
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.engine_host.environment import FOLDER_VARIABLE
from unirl.engine_host.environment_files import COMPLETE
from unirl.engines.vllm.config import VllmConfig
from unirl.engines.vllm.environment import ENVIRONMENT
from unirl.engines.vllm.settings import llm_arguments, variables
from unirl.loop.run_plan import with_run_folder
from unirl.tools.doctor import diagnose


def arguments(
    *, on_cpu: bool = False, reads_media: bool = False, bridged: dict[str, Any] | None = None, **settings: Any
) -> dict[str, Any]:
    return llm_arguments(
        VllmConfig(**settings),
        folder=Path("/there"),
        dtype=torch.bfloat16,
        on_cpu=on_cpu,
        reads_media=reads_media,
        bridged=bridged,
    )


def test_memory_that_can_be_released_is_allocated_otherwise_on_a_gpu_alone() -> None:
    assert arguments(sleep_mode=True)["enable_sleep_mode"] is True
    assert "enable_sleep_mode" not in arguments()
    # vLLM refuses it there.
    assert "enable_sleep_mode" not in arguments(sleep_mode=True, on_cpu=True)


def test_doctor_lists_the_environment_and_how_to_make_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    def listed() -> str:
        facts = diagnose(Catalog.discover(), folder=tmp_path).facts
        return next(row["state"] for row in facts["environments"] if row["engine"] == "vllm")

    assert listed() == "missing; create it: unirl engine-env vllm --accel cpu"
    folder = ENVIRONMENT.folder("cpu")
    folder.mkdir()
    (folder / COMPLETE).touch()
    assert listed() == str(folder)


def test_settings_become_arguments_of_vllm() -> None:
    result = arguments(max_model_len=100, gpu_memory=0.5, lora_rank=9, extra={"swap_space": 1})
    assert result["model"] == "/there"
    assert result["dtype"] == "bfloat16"
    assert (result["max_model_len"], result["gpu_memory_utilization"], result["swap_space"]) == (100, 0.5, 1)
    # The next of the ranks that vLLM has buffers for.
    assert (result["enable_lora"], result["max_lora_rank"]) == (True, 16)
    # The kernel of experts whose weights can be read.
    assert result["moe_backend"] == "triton"
    assert "gpu_memory_utilization" not in arguments(kv_cache_mb=64)
    assert arguments(kv_cache_mb=64)["kv_cache_memory_bytes"] == 67108864


def test_the_batch_invariant_mode_is_vllms() -> None:
    assert variables(VllmConfig(batch_invariant=True))["VLLM_BATCH_INVARIANT"] == "1"
    assert "VLLM_BATCH_INVARIANT" not in variables(VllmConfig())


def test_arguments_that_would_undo_what_is_promised_are_refused() -> None:
    refused = {"logprobs_mode": "raw_logprobs", "tensor_parallel_size": 2, "enable_expert_parallel": True}
    for key, value in refused.items():
        with pytest.raises(RecipeError, match=rf"engine\.extra\.{key}: not allowed"):
            arguments(extra={key: value})
    with pytest.raises(RecipeError, match=r"engine\.extra\.hf_overrides: not allowed; another key"):
        arguments(extra={"hf_overrides": {}}, bridged={"hf_overrides": {"visual_und": False}})
    with pytest.raises(RecipeError, match="expected at most 512"):
        arguments(lora_rank=513)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["backend.trains=lora"], "engine.lora_rank: got 0, but the backend trains LoRA adapters"),
        (["engine.max_num_seqs=0"], "engine.max_num_seqs: got 0, expected 1 or more"),
        (["launcher=ray", "launcher.placement=colocate"], "set engine.sleep_mode=true"),
    ],
)
def test_plans_that_cannot_work_are_refused_before_anything_starts(words: list[str], reason: str) -> None:
    assert not reasons_against("quickstart-text", "engine=vllm")
    assert reason in "\n".join(reasons_against("quickstart-text", "engine=vllm", *words))


def test_a_run_keeps_the_log_in_its_folder(tmp_path: Path) -> None:
    plan = compose("quickstart-text", ["engine=vllm"], catalog=Catalog.discover())
    placed = with_run_folder(plan, tmp_path)
    assert isinstance(placed.only.engine.config, VllmConfig)
    assert placed.only.engine.config.log_file == f"{tmp_path.resolve()}/logs/{{part}}-{{pid}}.log"
    assert placed.hash == plan.hash
    other = compose("quickstart-text", ["engine=vllm", "engine.log_file=/there/vllm.log"], catalog=Catalog.discover())
    assert with_run_folder(other, tmp_path).only.engine.config == other.only.engine.config
