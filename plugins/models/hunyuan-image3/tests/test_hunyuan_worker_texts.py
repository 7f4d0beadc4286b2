"""Rules of HunyuanImage-3.0's texts in vLLM-Omni's worker, whose token loop goes over a decoder: here the trained model."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from external_engines.worker_texts import sent
from unirl.conformance.doubles.requests import make_request
from unirl.core.errors import EchoMismatch
from unirl.core.types.request import Request
from unirl.core.types.rollout import verify_echo
from unirl.core.types.sampling import TextSamplingConfig
from unirl.core.types.track import Track
from unirl.engine_host.frames import to_frame
from unirl.engine_host.received import generated
from unirl.engine_host.received_text import received_track
from unirl.engines.vllm_omni.texts import written
from unirl.models.hunyuan_image3.model import HunyuanImageModel


@pytest.fixture
def request_of_thoughts(model: HunyuanImageModel) -> Request:
    sampling = TextSamplingConfig(max_new_tokens=12, options={"begin": "think"})
    return make_request(model, sampling, track="text", prompts=("a red ring", "it"), samples_per_prompt=2)


def answered(model: HunyuanImageModel, request: Request, **changes: Any) -> Track:
    """The track that the host makes of what the worker wrote. changes: of the settings that reached it."""
    arguments, tensors = sent(model, request)
    arguments["sampling"] |= changes
    answer, result = generated(**written(model, to_frame(arguments, tensors)), version=0)
    lengths = result["lengths"].tolist()
    return received_track(
        request,
        model=model,
        prompt_tokens=result["prompts"].split(result["prompt_lengths"].tolist()),
        temperature=answer["temperatures"][0],
        tokens=result["tokens"].split(lengths),
        log_probs=result["log_probs"].split(lengths),
        truncated=[reason == "length" for reason in answer["finish_reasons"]],
        version=0,
        mask=result["mask"].split(lengths),
        options=answer["options"],
    )


def test_a_forced_token_comes_back_masked(model: HunyuanImageModel, request_of_thoughts: Request) -> None:
    """With weights that often end thoughts. The one token that is allowed has all of the probability."""
    marks, head = model.marks, model.transformer.lm_head.weight
    before = head[marks.think_end].clone()
    with torch.no_grad():
        # Its logit is then the largest of about half of all states.
        head[marks.think_end] *= 8
    try:
        track = answered(model, request_of_thoughts)
    finally:
        with torch.no_grad():
            head[marks.think_end] = before
    verify_echo(request_of_thoughts, track)
    assert track.text.mask is not None and track.text.log_probs is not None
    is_forced = torch.cat([~row for row in track.text.mask])
    starts = [tokens[:-1] == marks.think_end for tokens in track.text.tokens]
    behind = torch.cat([torch.cat([torch.zeros(1, dtype=torch.bool), row]) for row in starts])
    assert bool(behind.any()) and torch.equal(is_forced, behind)
    assert set(torch.cat(track.text.tokens)[behind].tolist()) == {marks.recaption}
    assert not torch.cat(track.text.log_probs)[behind].any()


def test_options_that_did_not_reach_the_worker_are_an_error(
    model: HunyuanImageModel, request_of_thoughts: Request
) -> None:
    """What comes back is what the worker computed with, not what it was asked for."""
    assert dict(request_of_thoughts.text.options) == {"begin": "think"}
    with pytest.raises(EchoMismatch, match="options"):
        verify_echo(request_of_thoughts, answered(model, request_of_thoughts, options={"begin": ""}))


def test_a_completion_of_a_fixed_length_goes_on_past_its_stop_tokens(
    model: HunyuanImageModel, request_of_thoughts: Request
) -> None:
    params = dataclasses.replace(request_of_thoughts.text, length=5, stop_tokens=())
    track = answered(model, dataclasses.replace(request_of_thoughts, params=params))
    assert track.text.lengths == (5,) * 4
