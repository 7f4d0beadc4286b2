"""Settings, versions and the environment, checked before vLLM-Omni starts. None of this needs vLLM-Omni."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from external_engines.plans import reasons_against
from unirl.core.errors import RecipeError
from unirl.core.plugins.catalog import Catalog
from unirl.core.types.request import TextRequest
from unirl.core.types.sampling import TextSamplingConfig
from unirl.engine_host.environment import FOLDER_VARIABLE
from unirl.engine_host.environment_files import COMPLETE
from unirl.engines.vllm_omni.config import VllmOmniConfig
from unirl.engines.vllm_omni.environment import ENVIRONMENT
from unirl.engines.vllm_omni.settings import cpu_variables, omni_arguments, text_arguments
from unirl.tools.doctor import diagnose


def arguments(**settings: Any) -> dict[str, Any]:
    return omni_arguments(VllmOmniConfig(**settings), folder=Path("/there"), dtype=torch.bfloat16, on_cpu=False)


def test_settings_become_arguments_of_vllm_omni() -> None:
    result = arguments(max_num_seqs=3, batch_wait_ms=7.0, cached_prompts=9, extra={"vae_use_slicing": True})
    assert (result["model"], result["dtype"], result["enforce_eager"]) == ("/there", "bfloat16", False)
    assert (result["max_num_seqs"], result["request_batch_max_wait_ms"], result["vae_use_slicing"]) == (3, 7.0, True)
    assert (result["enable_prompt_embed_cache"], result["prompt_embed_cache_size"]) == (True, 9)
    assert "enable_prompt_embed_cache" not in arguments(cached_prompts=0)
    assert "enable_sleep_mode" not in result and arguments(sleep_mode=True)["enable_sleep_mode"] is True
    assert "step_execution" not in result and arguments(step_batching=True)["step_execution"] is True
    split = arguments(tensor_parallel=2)
    assert (split["num_gpus"], split["parallel_config"]) == (2, {"tensor_parallel_size": 2})
    assert cpu_variables(VllmOmniConfig(tensor_parallel=2))["UNIRL_VLLM_OMNI_CPU_DEVICES"] == "2"


def test_settings_of_texts_are_those_of_the_request() -> None:
    """As JSON values, which are all that the engine's process is sent."""
    sampling = TextSamplingConfig(temperature=0.7, top_p=0.9, top_k=3, max_new_tokens=5, stop=["."], stop_token_ids=[4])
    wanted = TextRequest(
        sampling=sampling,
        prompt_tokens=(torch.tensor([1]),),
        stop_tokens=(2, 4),
        seeds=(2**62,),
        options=(("scale", 1.5), ("begin", "think")),
        length=5,
    )
    result = json.loads(json.dumps(text_arguments(wanted, batch=6)))
    assert result == {
        "config": {"temperature": 0.7, "top_p": 0.9, "top_k": 3, "max_new_tokens": 5, "stop": ["."]},
        "stop_tokens": [2, 4],
        "options": {"scale": 1.5, "begin": "think"},
        "length": 5,
        "batch": 6,
    }


def test_arguments_that_would_undo_what_is_promised_are_refused() -> None:
    for key, value in (("cache_backend", "tea_cache"), ("max_num_seqs", 4), ("lora_path", "x")):
        with pytest.raises(RecipeError, match=rf"engine\.extra\.{key}: not allowed"):
            arguments(extra={key: value})


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["engine.max_num_seqs=0"], "engine.max_num_seqs: got 0, expected 1 or more"),
        (["engine.tensor_parallel=0"], "engine.tensor_parallel: got 0, expected 1 or more"),
        (["engine.release=0.31.0"], "engine.release: got '0.31.0'; engine 'vllm-omni' accepts"),
        (["launcher=ray", "launcher.placement=colocate"], "set engine.sleep_mode=true"),
        (["sampling.kernel=ddim-eta"], "got 'ddim-eta'; engine 'vllm-omni' supports"),
    ],
)
def test_plans_that_cannot_work_are_refused_before_anything_starts(words: list[str], reason: str) -> None:
    assert not reasons_against("quickstart", "engine=vllm-omni")
    assert reason in "\n".join(reasons_against("quickstart", "engine=vllm-omni", *words))


def test_the_doctor_shows_the_environment_of_an_earlier_release_where_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    def listed() -> dict[str, str]:
        rows = diagnose(Catalog.discover(), folder=tmp_path).facts["environments"]
        return {row["engine"]: row["state"] for row in rows if row["engine"].startswith("vllm-omni")}

    assert listed() == {"vllm-omni": f"missing; create it: {ENVIRONMENT.command('cpu')}"}
    earlier = ENVIRONMENT.of("0.30.0").folder("cpu")
    earlier.mkdir()
    (earlier / COMPLETE).touch()
    assert listed()["vllm-omni 0.30.0"] == str(earlier)
