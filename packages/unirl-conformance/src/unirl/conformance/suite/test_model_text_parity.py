"""A model of text against the implementation that it comes from, run by the spec's `text_parity` without any code of
the model: one prompt after the other, in fp32."""

from __future__ import annotations

from typing import Any

import torch
from unirl.conformance.claims import claim
from unirl.conformance.doubles.requests import PROMPTS, make_request
from unirl.conformance.doubles.rollouts import make_rollout
from unirl.conformance.fixtures.text_model import SCORE, TextModelCase
from unirl.core.errors import UniRLError
from unirl.core.specs.capability import Cap
from unirl.numerics.tokens.batches import pad_batch

SYSTEM = "be brief"
LENGTH = 12
"""Tokens of a completion: enough that an error of the cache adds up."""


@claim("model", proves=Cap.TEXT_STAGE, track="text")
def test_prompt_tokens_are_those_of_the_reference(case: TextModelCase) -> None:
    """Prompts have exactly the tokens that the reference implementation gives them: plain, in the chat template, with a
    system prompt, and with the switch for thinking either way.

    If it fails: let the checkpoint's own template make the whole prompt, with `add_generation_prompt`; add special
    tokens
    where there is no template alone; hand the switch on as the template calls it.
    """
    ways: list[dict[str, Any]] = [
        {"chat": False},
        {"chat": True},
        {"chat": True, "system_prompt": SYSTEM},
        {"chat": True, "thinking": False},
        {"chat": True, "thinking": True},
    ]
    tried = 0
    with case.model() as model:
        for way in ways:
            try:
                result = case.prompts(model, **way)
            except UniRLError:  # what it cannot do it rejects, of which another claim speaks
                continue
            expected = case.reference(case.sampling(**way)).prompt_tokens
            for prompt, mine, its in zip(PROMPTS, result, expected, strict=True):
                assert mine.tolist() == its.tolist(), f"with {way}, {prompt!r} is {mine.tolist()}, not {its.tolist()}"
            tried += 1
    case.record(f"of {len(ways)} ways of prompting, compared", tried)
    assert tried, "prompts are refused in every way"


@claim("model", proves=Cap.TEXT_STAGE, track="text")
def test_greedy_texts_are_those_of_the_reference(case: TextModelCase) -> None:
    """At temperature 0 the model writes, with a cache and in one batch of prompts of unequal length, token by token
    what the reference implementation writes for each prompt alone.

    If it fails: positions count the tokens of a prompt and not its padding; the mask hides the padding in every
    further step as well; a completion ends with the tokens that the checkpoint names.
    """
    with case.model() as model:
        sampling = case.sampling(temperature=0.0, max_new_tokens=LENGTH)
        request = make_request(
            model, sampling, track=case.track, prompts=PROMPTS, media=case.media, samples_per_prompt=1
        )
        result = make_rollout(model, request).text.tokens
        expected = case.reference(sampling).tokens
    for prompt, mine, its in zip(PROMPTS, result, expected, strict=True):
        assert mine.tolist() == its.tolist(), f"after {prompt!r} come {mine.tolist()}, not {its.tolist()}"


@claim("model", proves=Cap.TEXT_STAGE, track="text")
def test_log_probs_are_those_of_the_reference(case: TextModelCase) -> None:
    """The log-probs that training computes for texts of the reference implementation, all in one batch, are that
    one's, to the rounding of fp32.

    If it fails: the log-prob of a token is read from the logits one place before it; look at positions, mask and scale
    of attention, at the dtype of the weights, and at settings of the checkpoint that are not taken over.
    """
    with case.model() as model:
        expected = case.reference(case.sampling(max_new_tokens=LENGTH))
        prompts, texts = list(expected.prompt_tokens), list(expected.tokens)
        conditions = case.conditions(model, range(len(prompts)))
        batch = pad_batch(prompts, texts, pad_token=model.pad_token, conditions=conditions)
        result = model.score(batch, temperature=1.0)[0].cpu()
    gap = (result - torch.cat([row.cpu() for row in expected.log_probs]).to(result)).abs().max()
    case.record("gap of log-probs", float(gap), bound=SCORE)
