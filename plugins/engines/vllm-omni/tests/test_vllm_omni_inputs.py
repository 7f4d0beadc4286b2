"""How the pipeline in vLLM-Omni's environment encodes inputs, with stand-ins for what it imports of vLLM."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs

STANDS_IN = {
    "vllm.model_executor.layers.linear": "LinearBase",
    "vllm.platforms": "current_platform",
    "vllm_omni.diffusion.data": "DiffusionOutput",
    "vllm_omni.diffusion.request": "OmniDiffusionRequest",
}
CAT, DOG = ((MediaRef(modality="image", role="source", uri=f"/{name}.png"),) for name in ("cat", "dog"))


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, attribute in STANDS_IN.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            parent = ".".join(parts[:end])
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        setattr(sys.modules[name], attribute, type(attribute, (), {}))
    monkeypatch.delitem(sys.modules, "unirl.engines.vllm_omni.pipeline", raising=False)
    from unirl.engines.vllm_omni import pipeline as module

    yield module
    sys.modules.pop("unirl.engines.vllm_omni.pipeline")
    vars(sys.modules["unirl.engines.vllm_omni"]).pop("pipeline")


def test_inputs_of_one_text_are_encoded_one_by_one(pipeline: Any) -> None:
    encoded: list[str] = []

    def encode(_: Any, text: str, sampling: Any) -> dict[str, torch.Tensor]:
        encoded.append(text)
        return {"text": torch.tensor([[float(len(encoded))]])}

    inputs = Inputs(
        ids=("cat", "dog", "cat"),
        prompts=("make it red",) * 3,
        texts=("make it red",) * 3,
        media=(CAT, DOG, CAT),
    )
    worker = SimpleNamespace(bridge=SimpleNamespace(encode=encode), device="cpu")
    conditions = pipeline.RolloutPipeline._encoded(worker, inputs, sampling=None)
    assert encoded == ["make it red"] * 2
    assert conditions.expanded()["text"].tolist() == [[1.0], [2.0], [1.0]]
