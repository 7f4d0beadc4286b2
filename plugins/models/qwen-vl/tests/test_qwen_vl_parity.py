"""Prompt tokens, pixels, log-probs, gradients and greedy texts against transformers' own.

Tolerance of log-probs: 2e-5. Both sides are fp32 with about 1e-6 of rounding in logits of size 10, in another order of
sums for another shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from unirl.conformance import image_text_parity as parity
from unirl.core.errors import BatchError
from unirl.core.roles import TokenBatch
from unirl.core.types.inputs import Inputs
from unirl.core.types.request import TextRequest
from unirl.core.types.sampling import TextSamplingConfig
from unirl.core.types.track import Conditions
from unirl.models.qwen_vl.model import QwenVlModel
from unirl.numerics.tokens.batches import pack_batch, pad_batch
from unirl.numerics.tokens.rollout import generate_text, text_conditions

KINDS = ("qwen25", "qwen3")
TOLERANCE = {"rtol": 0.0, "atol": 2e-5}


def reference_prompts(folder: Path, inputs: Inputs, sampling: TextSamplingConfig) -> list[Any]:
    processor = parity.processor(folder)
    return [
        parity.prompt(processor, text, [Image.open(ref.uri) for ref in media], sampling)
        for text, media in zip(inputs.texts, inputs.media, strict=True)
    ]


def reference_log_probs(reference: Any, prompts: list[Any], answers: list[Tensor], *, temperature: float) -> Tensor:
    """Log-probs of the answers, one text at a time through all logits. Their image tokens are embedded as tokens."""
    result: list[Tensor] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        whole = torch.cat([prompt["input_ids"][0], answer])
        types = torch.nn.functional.pad(prompt["mm_token_type_ids"], (0, len(answer)))
        trunk, grid = reference.model, prompt["image_grid_thw"]
        positions, _ = trunk.get_rope_index(whole[None], types, image_grid_thw=grid)
        features = trunk.get_image_features(prompt["pixel_values"], grid, return_dict=True)
        shows = types.bool()
        embeddings = trunk.get_input_embeddings()(whole[None])
        embeddings = embeddings.masked_scatter(shows[..., None], torch.cat(features.pooler_output))
        deep = {}
        if "deepstack_features" in features:
            deep = {
                "visual_pos_masks": shows,
                "deepstack_visual_embeds": [*map(torch.cat, features.deepstack_features)],
            }
        hidden = trunk.language_model(inputs_embeds=embeddings, position_ids=positions, **deep).last_hidden_state
        logits = reference.lm_head(hidden)[0, len(whole) - len(answer) - 1 : -1]
        scores = torch.log_softmax(logits / temperature, dim=-1)
        result.append(scores[torch.arange(len(answer)), answer])
    return torch.cat(result)


def conditions(model: QwenVlModel, inputs: Inputs, sampling: TextSamplingConfig) -> dict[str, Any]:
    return dict(model.conditions(inputs, sampling=sampling))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{}, {"chat": False}, {"system_prompt": "Be brief."}])
def test_tokens_pixels_and_grids_are_those_of_the_processor(
    kind: str, settings: Any, load: Callable[..., QwenVlModel], folder: Callable[..., Path], inputs: Inputs
) -> None:
    model, asked = load(kind), TextSamplingConfig(**settings)
    expected = reference_prompts(folder(kind), inputs, asked)
    tokens = model.prompt_tokens(inputs, sampling=asked)
    result = model.conditions(inputs, sampling=asked)
    for row, its in enumerate(expected):
        assert tokens[row].tolist() == its["input_ids"][0].tolist()
        assert torch.equal(result["pixel_values"][row], its["pixel_values"])
        assert torch.equal(result["image_grid_thw"][row], its["image_grid_thw"])
    assert len({patches.shape for patches in result["pixel_values"]}) > 1, "images of one size test less"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_are_those_of_transformers_padded_packed_and_one_by_one(
    kind: str,
    attention: str,
    load: Callable[..., QwenVlModel],
    load_reference: Callable[..., Any],
    folder: Callable[..., Path],
    inputs: Inputs,
    answers: list[Tensor],
    sampling: TextSamplingConfig,
) -> None:
    model = load(kind, attention=attention)
    prompts, images = model.prompt_tokens(inputs, sampling=sampling), conditions(model, inputs, sampling)
    with torch.no_grad():
        expected = reference_log_probs(
            load_reference(kind), reference_prompts(folder(kind), inputs, sampling), answers, temperature=0.7
        )
        right = pad_batch(prompts, answers, pad_token=model.pad_token, conditions=images)
        for batch in (right, padded_left(right), pack_batch(prompts, answers, conditions=images)):
            result, entropy = model.score(batch, temperature=0.7, with_entropy=True)
            torch.testing.assert_close(result, expected, **TOLERANCE)
            assert entropy is not None and entropy.shape == expected.shape
        for row, lengths in enumerate(expected.split([len(answer) for answer in answers])):
            own = {name: values[row : row + 1] for name, values in images.items()}
            alone = pack_batch(prompts[row : row + 1], answers[row : row + 1], conditions=own)
            torch.testing.assert_close(model.score(alone, temperature=0.7)[0], lengths, **TOLERANCE)


def padded_left(right: TokenBatch) -> TokenBatch:
    """`pad_batch` pads on the right, where causal attention needs no mask; a batch made otherwise does."""
    assert right.attention_mask is not None
    shifts = [int(n) for n in (~right.attention_mask).sum(dim=1)]
    return dataclasses.replace(
        right,
        tokens=torch.stack([row.roll(n) for row, n in zip(right.tokens, shifts, strict=True)]),
        attention_mask=torch.stack([row.roll(n) for row, n in zip(right.attention_mask, shifts, strict=True)]),
        target_index=right.target_index + torch.tensor(shifts).repeat_interleave(torch.tensor(right.lengths)),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_transformers_and_the_tower_has_none(
    kind: str,
    load: Callable[..., QwenVlModel],
    load_reference: Callable[..., Any],
    folder: Callable[..., Path],
    inputs: Inputs,
    answers: list[Tensor],
    sampling: TextSamplingConfig,
) -> None:
    model, reference = load(kind), load_reference(kind)
    prompts, images = model.prompt_tokens(inputs, sampling=sampling), conditions(model, inputs, sampling)
    batch = pad_batch(prompts, answers, pad_token=model.pad_token, conditions=images)
    model.score(batch, temperature=1.3)[0].sum().backward()
    asked = reference_prompts(folder(kind), inputs, sampling)
    reference_log_probs(reference, asked, answers, temperature=1.3).sum().backward()
    result = dict(model.trainable.named_parameters())
    expected = dict(reference.named_parameters())
    assert list(result) == list(expected)  # the checkpoint's names
    for name, parameter in expected.items():
        if ".visual." in name:
            assert result[name].grad is None and not result[name].requires_grad
            continue
        scale = float(parameter.grad.abs().max())
        assert scale > 0, name
        # Sums of some 100 tokens in another order: 1e-4 of the largest element is 100 times their rounding.
        torch.testing.assert_close(result[name].grad, parameter.grad, rtol=0, atol=1e-4 * scale, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_the_plain_forward_is_transformers_own(
    kind: str,
    load: Callable[..., QwenVlModel],
    load_reference: Callable[..., Any],
    folder: Callable[..., Path],
    inputs: Inputs,
    sampling: TextSamplingConfig,
) -> None:
    prompt = reference_prompts(folder(kind), inputs, sampling)[1]
    with torch.no_grad():
        result, expected = load(kind).trainable(**prompt).logits, load_reference(kind)(**prompt).logits
    torch.testing.assert_close(result, expected, **TOLERANCE)


def test_an_image_is_encoded_once_however_many_samples_share_it(
    load: Callable[..., QwenVlModel], inputs: Inputs, answers: list[Tensor], sampling: TextSamplingConfig
) -> None:
    model = load()
    prompts = model.prompt_tokens(inputs, sampling=sampling)
    whole = Conditions(values=conditions(model, inputs, sampling), index=torch.tensor([2, 0, 2, 0, 1]))
    seen: list[int] = []
    model.trunk.visual.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    rows = whole.index.tolist()
    batch = pad_batch(
        [prompts[row] for row in rows],
        [answers[row] for row in rows],
        pad_token=model.pad_token,
        conditions=whole.expanded(),
    )
    with torch.no_grad():
        result = model.score(batch, temperature=1.0)[0].split([len(answers[row]) for row in rows])
    assert seen == [sum(len(patches) for patches in whole.values["pixel_values"])]
    torch.testing.assert_close(result[0], result[2], **TOLERANCE)


def test_tokens_over_the_image_of_another_prompt_are_refused(
    load: Callable[..., QwenVlModel], inputs: Inputs, answers: list[Tensor], sampling: TextSamplingConfig
) -> None:
    model = load()
    prompts = model.prompt_tokens(inputs, sampling=sampling)
    images = conditions(model, inputs.select([1, 0, 2]), sampling)
    batch = pad_batch(prompts, answers, pad_token=model.pad_token, conditions=images)
    with pytest.raises(BatchError, match=r"sample 0 has 2 image tokens, expected 6 .*different inputs"):
        model.score(batch, temperature=1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_texts_are_those_of_generate(
    kind: str, folder: Callable[..., Path], load: Callable[..., QwenVlModel], inputs: Inputs
) -> None:
    model, asked = load(kind), TextSamplingConfig(max_new_tokens=12, temperature=0.0)
    expected = parity.run(folder(kind), inputs=inputs, sampling=asked)
    request = TextRequest(
        sampling=asked,
        prompt_tokens=tuple(model.prompt_tokens(inputs, sampling=asked)),
        stop_tokens=model.stop_tokens,
        seeds=(0, 1, 2),
    )
    images = text_conditions(model, inputs, sampling=asked)
    result = generate_text(model, request, conditions=images)
    for row in range(3):
        assert result.tokens[row].tolist() == expected.tokens[row].tolist()
        torch.testing.assert_close(result.log_probs[row], expected.log_probs[row], **TOLERANCE)
