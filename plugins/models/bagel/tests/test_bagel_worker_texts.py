"""The half of vLLM-Omni's texts that needs no engine: the worker's token loop over a decoder, here the trained model."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from unirl.conformance.doubles.requests import make_request
from unirl.core.types.data import MediaRef
from unirl.core.types.request import Request
from unirl.core.types.sampling import TextSamplingConfig
from unirl.engine_host.frames import read_frame, to_frame
from unirl.engine_host.received import generated, rows
from unirl.engine_host.text_engine import ExternalTexts
from unirl.engines.vllm_omni.environment import PRODUCT
from unirl.engines.vllm_omni.settings import text_arguments
from unirl.engines.vllm_omni.texts import _conditions, written
from unirl.models.bagel.model import BagelModel
from unirl.numerics.tokens.rollout import GeneratedText, generate_text, text_conditions


def sent(model: BagelModel, request: Request) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The call that the host makes for a request, in batches of four rows."""
    calls: list[tuple[Any, Any]] = []

    class Sent(Exception):
        pass

    def note(arguments: Any, tensors: Any) -> Any:
        calls.append((arguments, dict(tensors)))
        raise Sent

    texts = ExternalTexts(
        PRODUCT,
        model=model,
        sampling=lambda wanted: text_arguments(wanted, batch=4),
        conditions=text_conditions,
        track=lambda *args, **made: pytest.fail("nothing was answered"),
    )
    with pytest.raises(Sent):
        texts.track(request, generate=note, version=0)
    # As it comes out of the frame in the engine's process.
    return read_frame(BytesIO(to_frame(*calls[0])).read)


def expected_of(model: BagelModel, request: Request) -> GeneratedText:
    conditions = text_conditions(model, request.inputs, sampling=request.text.sampling)
    return generate_text(model, request.text, conditions=conditions)


def test_the_worker_writes_what_it_is_asked_and_says_what_it_read(
    model: BagelModel, media: list[tuple[MediaRef, ...]]
) -> None:
    """Six rows in batches of four, with one source, one of another size, and two."""
    sampling = TextSamplingConfig(max_new_tokens=6, stop_token_ids=[*range(1, 200, 12)], temperature=0.8)
    request = make_request(
        model, sampling, track="text", prompts=("what is it?", "and it?", "a"), media=lambda number: media[number],
        samples_per_prompt=2,
    )  # fmt: skip
    arguments, tensors = sent(model, request)
    result = written(model, to_frame(arguments, tensors))
    expected = expected_of(model, request)
    assert result["tokens"] == [row.tolist() for row in expected.tokens]
    assert result["finish_reasons"] == ["length" if is_cut else "stop" for is_cut in expected.truncated]
    assert set(result["finish_reasons"]) == {"length", "stop"}, "both ends are to be seen"
    assert result["prompts"] == [row.tolist() for row in request.text.prompt_tokens]
    assert result["temperatures"] == [0.8] * 6
    assert result["media"] == arguments["media"] and len(set(result["media"])) == 3
    for own, other in zip(result["log_probs"], expected.log_probs, strict=True):
        # Another batch rounds differently in fp32; log-probs are of some nats.
        assert own == pytest.approx(other.tolist(), abs=1e-5)
    answer, _ = generated(**result, version=3)
    assert answer["version"] == 3


def test_the_worker_names_the_media_that_it_read_not_those_that_it_should_have_read(
    model: BagelModel, tmp_path: Path
) -> None:
    """Two images of one size, swapped on their way: texts and log-probs alone would not show it."""
    refs: list[MediaRef] = []
    for name in ("red", "blue"):
        Image.new("RGB", (64, 64), name).save(tmp_path / f"{name}.png")
        refs.append(MediaRef(modality="image", role="source", uri=str(tmp_path / f"{name}.png")))
    request = make_request(
        model, TextSamplingConfig(max_new_tokens=2), track="text", prompts=("it", "it"),
        media=lambda number: (refs[number],), samples_per_prompt=1,
    )  # fmt: skip
    arguments, tensors = sent(model, request)
    first, second = arguments["media"]
    other = {first: second, second: first}
    names = {name: name.split("/") for name in tensors}
    swapped = {"/".join((other.get(key, key), *rest)): tensors[name] for name, (key, *rest) in names.items()}
    assert written(model, to_frame(arguments, tensors))["media"] == [first, second]
    result = written(model, to_frame(arguments, swapped))
    assert result["media"] == [second, first]


def test_a_model_without_media_is_given_none() -> None:
    """Rows without tensors of their own have no conditions."""
    tensors = {"prompts": torch.tensor([1, 2, 3]), "prompt_lengths": torch.tensor([2, 1])}
    assert _conditions(rows({"media": ["", ""]}, tensors), device="cpu") is None
