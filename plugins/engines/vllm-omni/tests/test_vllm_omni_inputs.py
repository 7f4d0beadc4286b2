"""How the pipeline in vLLM-Omni's environment encodes inputs, with stand-ins for what it imports of vLLM."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from unirl.core.types.inputs import Inputs
from unirl.engine_host.sent_media import sent_media
from unirl.numerics.media import LoadedImage, load_image

STANDS_IN = {
    "vllm.model_executor.layers.linear": "LinearBase",
    "vllm.platforms": "current_platform",
    "vllm_omni.diffusion.data": "DiffusionOutput",
    "vllm_omni.diffusion.distributed.utils": "get_local_device",
    "vllm_omni.diffusion.request": "OmniDiffusionRequest",
}


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, attribute in STANDS_IN.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            parent = ".".join(parts[:end])
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        setattr(sys.modules[name], attribute, type(attribute, (), {}))
    monkeypatch.setattr(sys.modules["vllm_omni.diffusion.distributed.utils"], "get_local_device", lambda: "cpu")
    monkeypatch.delitem(sys.modules, "unirl.engines.vllm_omni.pipeline", raising=False)
    from unirl.engines.vllm_omni import pipeline as module

    yield module
    sys.modules.pop("unirl.engines.vllm_omni.pipeline")
    vars(sys.modules["unirl.engines.vllm_omni"]).pop("pipeline")


def test_inputs_of_one_text_are_encoded_one_by_one_with_their_own_images(pipeline: Any, tmp_path: Path) -> None:
    """And each is echoed by a hash of what was encoded."""
    cat, dog = (
        LoadedImage.of(torch.full((3, 2, height), value), role="source") for height, value in ((3, 0.25), (4, 1.0))
    )
    encoded: list[tuple[str, list[float]]] = []

    def encode(_: Any, text: str, media: Any, sampling: Any) -> dict[str, torch.Tensor]:
        encoded.append((text, [float(load_image(one).sum()) for one in media]))
        return {"text": torch.tensor([[float(len(encoded))]])}

    inputs = Inputs(
        ids=("cat", "dog", "cat"),
        prompts=("make it red",) * 3,
        texts=("make it red",) * 3,
        media=((cat,), (dog, cat), (cat,)),
    )
    worker = SimpleNamespace(bridge=SimpleNamespace(encode_with_media=encode), device="cpu")
    with sent_media(inputs, folder=str(tmp_path)) as sent:
        conditions, hashes = pipeline.RolloutPipeline._encoded(worker, sent.inputs, sampling=None)
        assert hashes == sent.of(sent.inputs)
    assert encoded == [("make it red", [4.5]), ("make it red", [24.0, 4.5])]
    assert hashes == [[cat.uri], [dog.uri, cat.uri], [cat.uri]]
    assert conditions.expanded()["text"].tolist() == [[1.0], [2.0], [1.0]]
