"""Every family against transformers: log-probs, gradients, cached greedy texts, adapters, and a build without values.

Tolerance of log-probs: 2e-5. Both sides are fp32 with about 1e-6 of rounding in logits of size 10, in another order of
sums for another shape.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from causal_lm_families import HYBRIDS, SETTINGS
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from unirl.core.specs.facts import names_in
from unirl.core.types.inputs import Inputs
from unirl.core.types.request import TextRequest
from unirl.core.types.sampling import TextSamplingConfig
from unirl.models.causal_lm.model import VERIFIED, AutoCausalLm
from unirl.models.causal_lm.plugin import SPEC
from unirl.numerics.tokens.batches import pack_batch, pad_batch
from unirl.numerics.tokens.rollout import generate_text

PROMPTS = ("What is 47 + 85?", "Say it in French: the ring is red.", "a")
ANSWERS = ("132", "l'anneau est rouge.", "?\n\nab")
SCALES = {"Cohere2": 0.25, "Granite": 1 / 8}
FAMILIES = pytest.mark.parametrize("name", [*SETTINGS, *HYBRIDS])


def reference(folder: Path, name: str) -> Any:
    """The checkpoint as a user of transformers loads it."""
    cls: Any = getattr(transformers, f"{name}ForCausalLM")
    return cls.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def texts(model: AutoCausalLm) -> tuple[list[Tensor], list[Tensor]]:
    prompts = model.prompt_tokens(Inputs.of_texts(PROMPTS), sampling=TextSamplingConfig())
    return prompts, [torch.tensor(model.tokenizer(answer)["input_ids"]) for answer in ANSWERS]


def reference_log_probs(own: Any, rows: tuple[list[Tensor], list[Tensor]], *, temperature: float) -> Tensor:
    result: list[Tensor] = []
    for prompt, answer in zip(*rows, strict=True):
        logits = own(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
        result.append(torch.log_softmax(logits.float() / temperature, dim=-1)[torch.arange(len(answer)), answer])
    return torch.cat(result)


WITHOUT_VALUES = sorted({*SETTINGS, *HYBRIDS} - {"Mixtral"})
"""Not Mixtral: its checkpoints name the experts otherwise than its module."""


def test_the_families_that_may_be_built_without_values_are_those_of_these_tests() -> None:
    assert {f"{name}ForCausalLM" for name in WITHOUT_VALUES} == VERIFIED


@FAMILIES
def test_log_probs_and_gradients_are_those_of_transformers(
    name: str, load: Callable[..., AutoCausalLm], folder: Callable[[str], Path]
) -> None:
    model, own = load(name, logits_chunk=5), reference(folder(name), name)
    rows = texts(model)
    expected = reference_log_probs(own, rows, temperature=0.7)
    result, _ = model.score(pad_batch(*rows, pad_token=model.pad_token), temperature=0.7)
    torch.testing.assert_close(result, expected, rtol=0, atol=2e-5)
    assert model.trainable.output_scale == SCALES.get(name, 1.0)
    result.sum().backward()
    expected.sum().backward()
    gradients = {key: p.grad for key, p in own.named_parameters()}
    ours = {key: p.grad for key, p in model.trainable.named_parameters()}
    assert ours.keys() == gradients.keys()
    largest = max(float(grad.abs().max()) for grad in gradients.values() if grad is not None)
    for key, grad in gradients.items():
        # An expert that no token was sent to has no gradient, or one of 0.
        theirs = torch.zeros(()) if grad is None else grad
        mine = torch.zeros(()) if ours[key] is None else ours[key]
        scale = max(float(theirs.abs().max()), 1e-3 * largest)
        # Sums of some 100 tokens in another order: 1e-4 of the largest element is 100 times their rounding.
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4 * scale, msg=lambda text, k=key: f"{k}: {text}")


@FAMILIES
def test_greedy_texts_are_those_of_generate(
    name: str, load: Callable[..., AutoCausalLm], folder: Callable[[str], Path]
) -> None:
    """Through the rollout of this project: padding on the left, a cache, and rows that end before others."""
    model, own = load(name), reference(folder(name), name)
    prompts, steps = texts(model)[0], 8
    wanted = TextRequest(
        sampling=TextSamplingConfig(temperature=0.0, max_new_tokens=steps),
        prompt_tokens=tuple(prompts),
        stop_tokens=model.stop_tokens,
        seeds=(0,) * len(prompts),
    )
    result = generate_text(model, wanted).tokens
    for row, prompt in enumerate(prompts):
        expected = own.generate(
            prompt[None], attention_mask=torch.ones_like(prompt)[None], max_new_tokens=steps, do_sample=False
        )
        assert result[row].tolist() == expected[0, len(prompt) :].tolist()


@FAMILIES
def test_adapters_go_to_every_layer_of_the_attention_and_blocks_are_found(
    name: str, load: Callable[..., AutoCausalLm]
) -> None:
    model = load(name)
    targets = tuple(f".{target}" for target in names_in(SPEC.lora_targets, model.trainable))
    linear = [key for key, part in model.trainable.named_modules() if isinstance(part, nn.Linear)]
    names = [key for key in linear if key.endswith(targets)]
    assert len(names) == sum("attn." in key for key in linear) >= 2
    (block,) = names_in(SPEC.wrap_blocks, model.trainable)
    assert sum(type(part).__name__ == block for part in model.trainable.modules()) == 2
    inject_adapter_in_model(LoraConfig(r=2, target_modules=names, init_lora_weights=False), model.trainable)
    model.score(pack_batch(*texts(model)), temperature=1.0)[0].sum().backward()
    gradients = [p.grad for p in model.trainable.parameters() if p.requires_grad]
    assert len(gradients) == 2 * len(names)
    assert all(grad is not None and float(grad.abs().max()) > 0 for grad in gradients)


@pytest.mark.parametrize("name", WITHOUT_VALUES)
def test_a_build_without_values_is_filled_with_those_of_the_checkpoint(
    name: str, load: Callable[..., AutoCausalLm]
) -> None:
    empty, whole = load(name, lazy=True), load(name)
    assert all(p.is_meta for p in empty.trainable.parameters())
    assert empty.trainable.output_scale == whole.trainable.output_scale
    expected = dict(whole.trainable.named_parameters())
    result = {key: torch.full(p.shape, torch.nan) for key, p in empty.trainable.named_parameters()}
    assert result.keys() == expected.keys()
    empty.fill(result)
    assert all(torch.equal(value, expected[key]) for key, value in result.items())
