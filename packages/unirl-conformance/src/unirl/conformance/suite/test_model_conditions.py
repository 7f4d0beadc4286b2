"""Conditions that a model computes from prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from unirl.conformance.claims import claim
from unirl.conformance.doubles.requests import PROMPTS
from unirl.conformance.fixtures.latent_model import NEGATIVE, LatentModelCase
from unirl.conformance.fixtures.model import relative_gap
from unirl.core.specs.capability import Cap

ENCODE_BOUND = 1e-5
"""fp32 matrix products sum in another order at another batch size: about 1e-6 through an encoder of a few layers."""


@claim("model")
def test_conditions_have_a_row_for_each_prompt(case: LatentModelCase) -> None:
    """Every condition has one row per prompt, in their order, without gradient, and is finite.

    If it fails: look at what `encode` returns for three prompts; run it in `torch.no_grad`.
    """
    with case.model() as model, torch.enable_grad():
        conditions = case.encode(model, PROMPTS)
    assert conditions, "`encode` gave no conditions"
    for name, value in conditions.items():
        assert len(value) == len(PROMPTS), f"{name!r} has {len(value)} rows for {len(PROMPTS)} prompts"
        for row in value:
            assert not row.requires_grad, f"{name!r} carries a gradient: encoders are frozen, it would only cost memory"
            assert bool(torch.isfinite(row.float()).all()), f"{name!r} holds numbers that are not finite"


@claim("model")
def test_different_prompts_give_different_conditions(case: LatentModelCase) -> None:
    """Different prompts get different conditions, words late in a prompt included. A tokenizer that lost its vocabulary
    makes all prompts equal, and nothing else would say so.

    If it fails: check that the tokenizers were loaded with their vocabularies, and what is cut off before the limit.
    """
    prompts = (*PROMPTS, f"{PROMPTS[-1]}s", "")
    with case.model() as model:
        conditions = case.encode(model, prompts)
    for one in range(len(prompts)):
        for other in range(one):
            differs = any(not torch.equal(value[one], value[other]) for value in conditions.values())
            assert differs, f"{prompts[one]!r} and {prompts[other]!r} get the same conditions"


@claim("model")
def test_conditions_do_not_depend_on_the_batch(case: LatentModelCase) -> None:
    """A prompt's conditions depend on the prompt alone: not on its neighbours, not on its place. Otherwise a sample
    would depend on what else was in the batch, and a replay would not repeat it.

    If it fails: pad to `sampling.max_sequence_length` instead of to the longest prompt, and mask the padding.
    """
    long, short = max(PROMPTS, key=len), min(PROMPTS, key=len)
    with case.model() as model:
        alone = case.encode(model, [short])
        beside = case.encode(model, [long, short, short])
    for name, value in beside.items():
        assert torch.equal(value[1], value[2]), f"{name!r}: one prompt in one batch got two different rows"
        shapes = alone[name][0].shape, value[1].shape
        assert shapes[0] == shapes[1], f"{name!r}: {shapes[0]} for a prompt alone, {shapes[1]} beside a longer one"
        gap = relative_gap(value[1].float(), alone[name][0].float())
        case.record(f"gap of {name}", gap, bound=ENCODE_BOUND)


@claim("model", proves=Cap.GUIDANCE)
def test_negative_conditions_have_the_shapes_of_positive_ones(case: LatentModelCase) -> None:
    """The conditions of a negative prompt, the empty one included, have the names, shapes and dtypes of any other
    prompt's, so that guidance can run both in one forward.

    If it fails: pad all prompts to one length, and return the same names whatever the prompt.
    """
    with case.model() as model:
        positive = _shapes(case.encode(model, [max(PROMPTS, key=len)]))
        for prompt in ("", NEGATIVE, "many words " * 200):
            result = _shapes(case.encode(model, [prompt]))
            assert result == positive, f"{prompt[:20]!r} gives {result}; {max(PROMPTS, key=len)!r} gives {positive}"


def _shapes(conditions: Mapping[str, Any]) -> dict[str, Any]:
    """name -> shape and dtype; no shape of ragged ones, of which each row has its own."""
    return {
        name: ("ragged", value[0].dtype) if isinstance(value, tuple) else (value.shape, value.dtype)
        for name, value in conditions.items()
    }
