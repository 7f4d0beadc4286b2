"""The half of vLLM-Omni's texts that needs no engine: the worker's token loop over a decoder, here the trained model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from external_engines.worker_texts import sent
from PIL import Image
from unirl.conformance.doubles.requests import make_request
from unirl.core.types.data import MediaRef
from unirl.core.types.request import Request
from unirl.core.types.sampling import TextSamplingConfig
from unirl.engine_host.frames import to_frame
from unirl.engine_host.received import generated, rows
from unirl.engines.vllm_omni.texts import _conditions, written
from unirl.models.bagel.model import BagelModel
from unirl.numerics.tokens.rollout import GeneratedText, generate_text, text_conditions


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


def test_rows_without_images_go_beside_rows_with_some(model: BagelModel, media: list[tuple[MediaRef, ...]]) -> None:
    """And by themselves."""
    sampling = TextSamplingConfig(max_new_tokens=4)
    for shown in ({1}, set[int]()):
        request = make_request(
            model, sampling, track="text", prompts=("a", "what is it?", "b"), samples_per_prompt=1,
            media=lambda number, shown=shown: media[number] if number in shown else (),
        )  # fmt: skip
        arguments, tensors = sent(model, request)
        assert [bool(key) for key in arguments["media"]] == [number in shown for number in range(3)]
        result, expected = written(model, to_frame(arguments, tensors)), expected_of(model, request)
        assert result["tokens"] == [row.tolist() for row in expected.tokens]
        for own, other in zip(result["log_probs"], expected.log_probs, strict=True):
            assert own == pytest.approx(other.tolist(), abs=1e-5)


def test_a_model_without_media_is_given_none() -> None:
    """Rows without tensors of their own have no conditions."""
    tensors = {"prompts": torch.tensor([1, 2, 3]), "prompt_lengths": torch.tensor([2, 1])}
    assert _conditions(rows({"media": ["", ""]}, tensors), device="cpu") is None
