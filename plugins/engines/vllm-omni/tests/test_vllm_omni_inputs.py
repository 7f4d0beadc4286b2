"""How the pipeline in vLLM-Omni's environment encodes inputs, with stand-ins for what it imports of vLLM."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from unirl.core.types.inputs import Inputs, Turn
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


def test_a_model_of_one_sequence_is_given_whole_rows_each_with_its_own_turns(pipeline: Any, tmp_path: Path) -> None:
    """Their images are in memory, and each is echoed by all that was encoded."""
    cat, dog = (LoadedImage.of(torch.full((3, 2, 2), value), role="source") for value in (0.25, 1.0))
    encoded: list[Inputs] = []

    def encode(_: Any, inputs: Inputs, sampling: Any) -> dict[str, Any]:
        encoded.append(inputs)
        return {"text": (torch.full((len(encoded),), 1.0),)}

    turns = ((Turn(stage="plan", tokens=(3,)),), (Turn(stage="plan", tokens=(4,)), Turn(stage="draft", media=(dog,))))
    inputs = Inputs(
        ids=("a", "b", "a"), prompts=("x",) * 3, texts=("x",) * 3, media=((cat,),) * 3, turns=(*turns, turns[0])
    )
    bridge = SimpleNamespace(checkpoint=encode, encode_sequence=encode, prefilled=encode)
    worker = SimpleNamespace(bridge=bridge, device="cpu")
    with sent_media(inputs, folder=str(tmp_path)) as sent:
        conditions, echo = pipeline.RolloutPipeline._encoded(worker, sent.inputs, sampling=None)
        assert echo == sent.of(sent.inputs)
    assert [len(own.ids) for own in encoded] == [1, 1]
    assert [own.turns[0][0].tokens for own in encoded if own.turns] == [(3,), (4,)]
    image = encoded[1].turns[0][1].media[0] if encoded[1].turns else None
    assert image is not None and torch.equal(load_image(image), dog.pixels)
    assert torch.equal(load_image(encoded[0].media[0][0]), cat.pixels)
    assert [len(value) for value in conditions.expanded()["text"]] == [1, 2, 1]


def test_turns_are_not_dropped_by_a_bridge_that_takes_none(pipeline: Any, tmp_path: Path) -> None:
    inputs = Inputs(ids=("a",), prompts=("x",), texts=("x",), media=((),), turns=((Turn(stage="plan", text="y"),),))
    worker = SimpleNamespace(bridge=SimpleNamespace(encode=None), device="cpu")
    with sent_media(inputs, folder=str(tmp_path)) as sent, pytest.raises(RuntimeError, match="got turns for 'x'"):
        pipeline.RolloutPipeline._encoded(worker, sent.inputs, sampling=None)
