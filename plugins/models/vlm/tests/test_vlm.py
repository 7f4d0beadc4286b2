"""Every family against transformers: prompt tokens, pixels, log-probs, gradients, greedy texts, adapters.

Tolerance of log-probs: 2e-5. Both sides are fp32 with about 1e-6 of rounding in logits of size 10, in another order of
sums for another shape.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from PIL import Image
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText
from unirl.conformance import image_text_parity as parity
from unirl.core.errors import BatchError
from unirl.core.specs.facts import names_in
from unirl.core.types.inputs import Inputs
from unirl.core.types.request import TextRequest
from unirl.core.types.sampling import TextSamplingConfig
from unirl.core.types.track import Conditions
from unirl.models.vlm.model import VERIFIED, Vlm
from unirl.models.vlm.plugin import SPEC
from unirl.numerics.tokens.batches import pad_batch
from unirl.numerics.tokens.rollout import generate_text, text_conditions
from vlm_families import FAMILIES

pytestmark = pytest.mark.slow

TOLERANCE = {"rtol": 0.0, "atol": 2e-5}
ALL = pytest.mark.parametrize("name", FAMILIES)
ANSWERS = ("132", "red, and it is a ", "a?")
"""Then one token more each, the one that stands for images in prompts."""


def answers(model: Vlm) -> list[Tensor]:
    token = model.trunk.config.image_token_id
    return [torch.tensor([*model.tokenizer(answer)["input_ids"], token]) for answer in ANSWERS]


def asked(folder: Path, inputs: Inputs, sampling: TextSamplingConfig) -> list[Any]:
    processor = parity.processor(folder)
    return [
        parity.prompt(processor, text, [Image.open(ref.uri) for ref in media], sampling)
        for text, media in zip(inputs.texts, inputs.media, strict=True)
    ]


def reference_log_probs(own: Any, prompts: list[Any], texts: list[Tensor], *, temperature: float) -> Tensor:
    """Token by token with transformers' cache, for which every token after the prompt is text."""
    result: list[Tensor] = []
    for prompt, text in zip(prompts, texts, strict=True):
        forced = iter(text.tolist())
        made = own.generate(
            **prompt,
            max_new_tokens=len(text),
            do_sample=False,
            eos_token_id=-1,
            output_logits=True,
            return_dict_in_generate=True,
            prefix_allowed_tokens_fn=lambda *_, forced=forced: [next(forced)],
        )
        scores = torch.cat(made.logits).log_softmax(dim=1) if temperature == 1 else None
        scores = torch.log_softmax(torch.cat(made.logits) / temperature, dim=1) if scores is None else scores
        result.append(scores.gather(1, text[:, None]).squeeze(1))
    return torch.cat(result)


def batch_of(model: Vlm, inputs: Inputs) -> Any:
    sampling = TextSamplingConfig()
    prompts, images = model.prompt_tokens(inputs, sampling=sampling), model.conditions(inputs, sampling=sampling)
    return pad_batch(prompts, answers(model), pad_token=model.pad_token, conditions=images)


def test_the_families_that_may_be_built_without_values_are_those_of_these_tests() -> None:
    assert {f"{name}ForConditionalGeneration" for name in FAMILIES} == VERIFIED


@ALL
@pytest.mark.parametrize("settings", [{}, {"chat": False}, {"system_prompt": "Be brief."}])
def test_tokens_and_images_are_those_of_the_processor(
    name: str, settings: Any, load: Callable[..., Vlm], folder: Callable[[str], Path], inputs: Inputs
) -> None:
    model, sampling = load(name), TextSamplingConfig(**settings)
    expected = asked(folder(name), inputs, sampling)
    tokens, images = model.prompt_tokens(inputs, sampling=sampling), model.conditions(inputs, sampling=sampling)
    of_tokens = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
    for row, its in enumerate(expected):
        assert tokens[row].tolist() == its["input_ids"][0].tolist()
        assert images.keys() == its.keys() - of_tokens
        for key, values in images.items():
            assert torch.equal(values[row], its[key]), key


@ALL
def test_log_probs_are_those_of_transformers_in_a_padded_batch_and_one_by_one(
    name: str,
    load: Callable[..., Vlm],
    load_reference: Callable[[str], Any],
    folder: Callable[[str], Path],
    inputs: Inputs,
) -> None:
    model = load(name, logits_chunk=5)
    prompts, texts = asked(folder(name), inputs, TextSamplingConfig()), answers(model)
    with torch.no_grad():
        expected = reference_log_probs(load_reference(name), prompts, texts, temperature=0.7)
        result, entropy = model.score(batch_of(model, inputs), temperature=0.7, with_entropy=True)
        torch.testing.assert_close(result, expected, **TOLERANCE)
        assert entropy is not None and entropy.shape == expected.shape
        for row, its in enumerate(expected.split([len(text) for text in texts])):
            alone = inputs.select([row])
            sampling = TextSamplingConfig()
            one = pad_batch(
                model.prompt_tokens(alone, sampling=sampling),
                [texts[row]],
                pad_token=model.pad_token,
                conditions=model.conditions(alone, sampling=sampling),
            )
            torch.testing.assert_close(model.score(one, temperature=0.7)[0], its, **TOLERANCE)


@ALL
def test_text_alone_is_continued_as_transformers_does(
    name: str, load: Callable[..., Vlm], load_reference: Callable[[str], Any]
) -> None:
    model = load(name)
    tokens = torch.tensor([model.tokenizer("What is it?")["input_ids"]])
    positions, mask = torch.arange(tokens.shape[1])[None], torch.ones_like(tokens, dtype=torch.bool)
    with torch.no_grad():
        expected = load_reference(name)(input_ids=tokens).logits[:, -1]
    result, cache = model.next_logits(tokens, positions=positions, attention_mask=mask, cache=None)
    # One fp32 forward; logits are of order 1.
    torch.testing.assert_close(result, expected.float(), **TOLERANCE)
    longer = torch.cat([tokens, tokens[:, :1]], dim=1)
    with torch.no_grad():
        expected = load_reference(name)(input_ids=longer).logits[:, -1]
    following, ones = torch.tensor([[tokens.shape[1]]]), torch.ones_like(longer, dtype=torch.bool)
    result, _ = model.next_logits(tokens[:, :1], positions=following, attention_mask=ones, cache=cache)
    torch.testing.assert_close(result, expected.float(), **TOLERANCE)


@ALL
@pytest.mark.parametrize("train_vision", [False, True])
def test_gradients_are_those_of_transformers_and_reach_the_tower_where_it_trains(
    name: str,
    train_vision: bool,
    load: Callable[..., Vlm],
    load_reference: Callable[[str], Any],
    folder: Callable[[str], Path],
    inputs: Inputs,
) -> None:
    """Gradients of each completion's first token: it comes from the prompt alone, as in transformers' own forward."""
    model, own = load(name, train_vision=train_vision), load_reference(name)
    sampling = TextSamplingConfig()
    firsts = [text[:1] for text in answers(model)]
    prompts, images = model.prompt_tokens(inputs, sampling=sampling), model.conditions(inputs, sampling=sampling)
    batch = pad_batch(prompts, firsts, pad_token=model.pad_token, conditions=images)
    model.score(batch, temperature=1.0)[0].sum().backward()
    for prompt, first in zip(asked(folder(name), inputs, sampling), firsts, strict=True):
        own(**prompt).logits[0, -1].log_softmax(dim=0)[first].sum().backward()
    language = {f"model.{key}" for key, _ in _language(own)}
    result, expected = dict(model.trainable.named_parameters()), dict(own.named_parameters())
    assert list(result) == list(expected)  # the checkpoint's names
    largest = max(float(p.grad.abs().max()) for p in expected.values() if p.grad is not None)
    towers = 0
    for key, parameter in expected.items():
        is_tower = key.startswith("model.") and key not in language
        if is_tower and not train_vision:
            assert result[key].grad is None and not result[key].requires_grad
            continue
        assert result[key].requires_grad
        theirs = torch.zeros(()) if parameter.grad is None else parameter.grad
        mine = torch.zeros(()) if result[key].grad is None else result[key].grad
        towers += is_tower and bool(mine.abs().max() > 0)
        # Sums of some 100 tokens in another order: 1e-4 of the largest element is 100 times their rounding.
        scale = max(float(theirs.abs().max()), 1e-3 * largest)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4 * scale, msg=lambda text, k=key: f"{k}: {text}")
    assert bool(towers) is train_vision


def _language(own: Any) -> Any:
    decoder = own.model.get_decoder()
    (prefix,) = (key for key, part in own.model.named_modules() if part is decoder)
    return ((f"{prefix}.{key}", parameter) for key, parameter in decoder.named_parameters())


@ALL
def test_greedy_texts_are_those_of_generate(
    name: str, folder: Callable[[str], Path], load: Callable[..., Vlm], inputs: Inputs
) -> None:
    """Through the rollout of this project: padding on the left, a cache, and rows that end before others."""
    model, sampling = load(name), TextSamplingConfig(max_new_tokens=12, temperature=0.0)
    expected = parity.run(folder(name), inputs=inputs, sampling=sampling)
    request = TextRequest(
        sampling=sampling,
        prompt_tokens=tuple(model.prompt_tokens(inputs, sampling=sampling)),
        stop_tokens=model.stop_tokens,
        seeds=(0, 1, 2),
    )
    result = generate_text(model, request, conditions=text_conditions(model, inputs, sampling=sampling))
    for row in range(3):
        assert result.tokens[row].tolist() == expected.tokens[row].tolist()
        torch.testing.assert_close(result.log_probs[row], expected.log_probs[row], **TOLERANCE)


@ALL
@pytest.mark.parametrize("train_vision", [False, True])
def test_adapters_go_to_the_attention_of_the_parts_that_train(
    name: str, train_vision: bool, load: Callable[..., Vlm], inputs: Inputs
) -> None:
    model = load(name, train_vision=train_vision)
    targets = names_in(SPEC.lora_targets, model.trainable)
    linear = [key for key, part in model.trainable.named_modules() if isinstance(part, nn.Linear)]
    language = {f"model.{key}" for key, _ in _language(model.trainable)}
    inside = [key for key in targets if f"{key}.weight" in language]
    assert len(inside) == sum("attn." in key for key in linear if f"{key}.weight" in language) >= 8
    assert (len(targets) > len(inside)) is train_vision
    assert set(targets) <= set(linear)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False), model.trainable)
    model.score(batch_of(model, inputs), temperature=1.0)[0].sum().backward()
    for key in targets:
        layer: Any = model.trainable.get_submodule(key)
        if "layers.1." in key and key not in inside:
            continue  # of a tower whose features are those of the block before
        assert float(layer.lora_A["default"].weight.grad.abs().max()) > 0, key


@ALL
def test_an_image_is_encoded_once_however_many_samples_share_it(
    name: str, load: Callable[..., Vlm], inputs: Inputs
) -> None:
    model, sampling, texts = load(name), TextSamplingConfig(), None
    texts = answers(model)
    prompts = model.prompt_tokens(inputs, sampling=sampling)
    values = dict(model.conditions(inputs, sampling=sampling))
    rows = [2, 0, 2, 0, 1]
    whole = Conditions(values=values, index=torch.tensor(rows)).expanded()
    batch = pad_batch(
        [prompts[row] for row in rows], [texts[row] for row in rows], pad_token=model.pad_token, conditions=whole
    )
    seen: list[int] = []
    tower: Any = model.trunk.get_encoder(modality="image")
    tower.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(len(args[0] if args else kwargs["pixel_values"])), with_kwargs=True
    )
    with torch.no_grad():
        result = model.score(batch, temperature=1.0)[0].split([len(texts[row]) for row in rows])
        shared = list(seen)
        seen.clear()
        model.score(batch_of(model, inputs), temperature=1.0)
    assert shared == seen and len(seen) == 1
    torch.testing.assert_close(result[0], result[2], **TOLERANCE)


@ALL
def test_tokens_over_the_images_of_another_prompt_are_refused(
    name: str, load: Callable[..., Vlm], inputs: Inputs
) -> None:
    """Both have as many image tokens together as their images need."""
    model, sampling = load(name), TextSamplingConfig()
    prompts = model.prompt_tokens(inputs, sampling=sampling)
    images = model.conditions(inputs.select([1, 0, 2]), sampling=sampling)
    batch = pad_batch(prompts, answers(model), pad_token=model.pad_token, conditions=images)
    with pytest.raises(BatchError, match=r"sample 0 has \d+ image tokens, expected \d+ .*different inputs"):
        model.score(batch, temperature=1.0)


@ALL
def test_a_build_without_values_is_filled_with_those_of_the_checkpoint(name: str, load: Callable[..., Vlm]) -> None:
    empty, whole = load(name, lazy=True), load(name)
    assert all(p.is_meta for p in empty.trainable.parameters())
    expected = dict(whole.trainable.named_parameters())
    result = {key: torch.full(p.shape, torch.nan) for key, p in empty.trainable.named_parameters()}
    assert result.keys() == expected.keys()
    empty.fill(result)
    assert all(torch.equal(value, expected[key]) for key, value in result.items())


@ALL
def test_what_it_saves_is_an_ordinary_checkpoint(
    name: str, load: Callable[..., Vlm], folder: Callable[[str], Path], tmp_path: Path
) -> None:
    model = load(name)
    model.trainable.save_pretrained(tmp_path)  # type: ignore[operator]
    saved, original = (json.loads((path / "config.json").read_text()) for path in (tmp_path, folder(name)))
    assert saved["architectures"] == original["architectures"]
    again = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert type(again).__module__.startswith("transformers.")
    kept = again.state_dict()
    assert all(torch.equal(weight, kept[key]) for key, weight in model.trainable.state_dict().items())
