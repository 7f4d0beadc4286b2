"""Settings, versions and the environment, checked before SGLang starts. None of this needs SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from external_engines.plans import reasons_against
from unirl.core.errors import RecipeError
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.engines.sglang.config import SglangConfig
from unirl.engines.sglang.server import _Server
from unirl.engines.sglang.settings import server_arguments
from unirl.models.sd3.bridges.sglang import BRIDGE


def arguments(**settings: Any) -> Mapping[str, Any]:
    return server_arguments(
        SglangConfig(**settings), folder=Path("/there"), dtype=torch.bfloat16, bridge=BRIDGE, on_cpu=False
    )


def test_each_encoder_gets_the_tokens_that_its_own_tokenizer_has() -> None:
    """SGLang by itself gives CLIP 77, which are other conditions where its tokenizer has fewer."""
    tokenizers = [SimpleNamespace(model_max_length=length) for length in (8, 9, 99)]
    assert BRIDGE.encoder_lengths(tokenizers, LatentSamplingConfig(max_sequence_length=16)) == (8, 9, 16)


def test_settings_become_arguments_of_sglang() -> None:
    result = arguments(port=5000, log_level="ERROR", extra={"attention_backend": "fa"})
    assert (result["model_path"], result["backend"], result["num_gpus"]) == ("/there", "sglang", 1)
    assert (result["dit_precision"], result["vae_precision"]) == ("bf16", "bf16")
    assert result["text_encoder_precisions"] == ["bf16"] * 3
    assert (result["scheduler_port"], result["log_level"], result["attention_backend"]) == (5000, "error", "fa")
    assert result["enable_torch_compile"] is True
    assert arguments(enforce_eager=True)["enable_torch_compile"] is False
    assert "scheduler_port" not in arguments()


def test_arguments_that_would_undo_what_is_promised_are_refused() -> None:
    for key, value in (("enable_cache_dit", True), ("lora_merge_mode", "dynamic"), ("tp_size", 2)):
        with pytest.raises(RecipeError, match=rf"engine\.extra\.{key}: not allowed"):
            arguments(extra={key: value})


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["engine.max_num_seqs=0"], "engine.max_num_seqs: got 0, expected 1 or more"),
        (["engine.port=70000"], "engine.port: got 70000, expected 0 to 65535"),
        (["launcher=ray", "launcher.placement=colocate"], "set engine.sleep_mode=true"),
        (["sampling.kernel=ddim-eta"], "got 'ddim-eta'; engine 'sglang' supports"),
    ],
)
def test_plans_that_cannot_work_are_refused_before_anything_starts(words: list[str], reason: str) -> None:
    assert not reasons_against("quickstart", "engine=sglang")
    assert reason in "\n".join(reasons_against("quickstart", "engine=sglang", *words))


def test_batches_have_rows_of_one_input_and_inputs_of_one_text_are_kept_apart() -> None:
    """SGLang encodes a batch once for all of its rows."""
    server = _Server()
    server._max_rows = 2
    images = [(MediaRef(modality="image", role="source", uri=f"/{name}.png"),) for name in ("cat", "dog")]
    inputs = Inputs(
        ids=("cat", "dog", "cat", "cat"),
        prompts=("make it red",) * 4,
        texts=("make it red",) * 4,
        media=tuple(images[row] for row in (0, 1, 0, 0)),
    )
    assert list(server._pieces(inputs)) == [[0, 2], [3], [1]]


@pytest.mark.parametrize("bridge", ["unirl.nowhere:BRIDGE", "unirl.models.sd3.bridges.sglang:NOTHING"])
def test_a_bridge_that_cannot_be_imported_is_an_error_before_sglang_starts(bridge: str) -> None:
    with pytest.raises((ModuleNotFoundError, AttributeError), match=r"nowhere|NOTHING"):
        _Server().load({"bridge": bridge, "max_rows": 1, "arguments": {}}, {})
