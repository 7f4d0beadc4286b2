"""Log-probs, entropies, gradients and cached logits against transformers' own forward in fp32.

Tolerance of log-probs: 2e-5. Both sides are fp32 with about 1e-6 of rounding in logits of size 10, in another order of
sums for another shape; seen are differences up to 3e-6.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids
from unirl.core.errors import RecipeError
from unirl.core.roles import TokenBatch
from unirl.core.specs.facts import names_in
from unirl.model_host.tokens.causal_lm import packed_offsets
from unirl.models.qwen3.model import Qwen3Model
from unirl.models.qwen3.plugin import MOE, SPEC
from unirl.numerics.tokens.batches import pack_batch, pad_batch

KINDS = ("dense", "untied", "moe")
TOLERANCE = {"rtol": 0.0, "atol": 2e-5}
Texts = tuple[list[Tensor], list[Tensor]]


def reference_log_probs(reference: Any, texts: Texts, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the answers, one text at a time through all of its logits."""
    log_probs: list[Tensor] = []
    entropies: list[Tensor] = []
    for prompt, answer in zip(*texts, strict=True):
        logits = reference(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
        scores = torch.log_softmax(logits.float() / temperature, dim=-1)
        log_probs.append(scores[torch.arange(len(answer)), answer])
        entropies.append(torch.distributions.Categorical(logits=scores).entropy())
    return torch.cat(log_probs), torch.cat(entropies)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_are_those_of_transformers_padded_packed_and_one_by_one(
    kind: str, attention: str, load: Callable[..., Qwen3Model], load_reference: Callable[..., Any], texts: Texts
) -> None:
    model = load(kind, attention=attention, logits_chunk=5)
    singles = [pack_batch([prompt], [answer]) for prompt, answer in zip(*texts, strict=True)]
    with torch.no_grad():
        expected, entropy = reference_log_probs(load_reference(kind), texts, temperature=0.7)
        padded = model.score(pad_batch(*texts, pad_token=model.pad_token), temperature=0.7, with_entropy=True)
        packed = model.score(pack_batch(*texts), temperature=0.7, with_entropy=True)
        one_by_one = [model.score(batch, temperature=0.7)[0] for batch in singles]
    for result in (padded, packed):
        assert result[0].dtype is torch.float32
        assert result[1] is not None
        torch.testing.assert_close(result[0], expected, **TOLERANCE)
        torch.testing.assert_close(result[1], entropy, **TOLERANCE)
    torch.testing.assert_close(torch.cat(one_by_one), expected, **TOLERANCE)


def padded_left(right: TokenBatch) -> TokenBatch:
    """`pad_batch` pads on the right, where causal attention needs no mask; a batch made otherwise does."""
    assert right.attention_mask is not None
    shifts = [int(n) for n in (~right.attention_mask).sum(dim=1)]
    rows = right.tokens.shape[1]
    return dataclasses.replace(
        right,
        tokens=torch.stack([row.roll(n) for row, n in zip(right.tokens, shifts, strict=True)]),
        positions=torch.stack([(torch.arange(rows) - n).clamp_min(0) for n in shifts]),
        attention_mask=torch.stack([row.roll(n) for row, n in zip(right.attention_mask, shifts, strict=True)]),
        target_index=right.target_index + torch.tensor(shifts).repeat_interleave(torch.tensor(right.lengths)),
    )


def test_padding_on_the_left_changes_no_log_prob(model: Qwen3Model, texts: Texts) -> None:
    right = pad_batch(*texts, pad_token=model.pad_token)
    with torch.no_grad():
        expected = model.score(right, temperature=1.0)[0]
        result = model.score(padded_left(right), temperature=1.0)[0]
    torch.testing.assert_close(result, expected, **TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_are_the_last_of_transformers_padded_on_either_side_and_packed(
    kind: str, load: Callable[..., Qwen3Model], load_reference: Callable[..., Any], texts: Texts
) -> None:
    """Those before each target, after the final norm: of order 1, with the rounding of logits or less."""
    model, reference = load(kind), load_reference(kind)
    right = pad_batch(*texts, pad_token=model.pad_token)
    # A trunk that is handed in is the one that runs: twice the weight of its norm is twice each state, exactly.
    other: Any = copy.deepcopy(model.trunk)
    with torch.no_grad():
        other.norm.weight.mul_(2.0)
        expected = torch.cat([
            reference(torch.cat([prompt, answer])[None], output_hidden_states=True).hidden_states[-1][
                0, len(prompt) - 1 : -1
            ]
            for prompt, answer in zip(*texts, strict=True)
        ])  # fmt: skip
        for batch in (right, padded_left(right), pack_batch(*texts)):
            result = model.hidden(batch)
            torch.testing.assert_close(result, expected, **TOLERANCE)
            assert torch.equal(model.hidden(batch, trunk=other), 2.0 * result)


@pytest.mark.parametrize("kind", KINDS)
def test_full_gradients_are_those_of_transformers(
    kind: str, load: Callable[..., Qwen3Model], load_reference: Callable[..., Any], texts: Texts
) -> None:
    model, reference = load(kind), load_reference(kind)
    model.score(pack_batch(*texts), temperature=1.3)[0].sum().backward()
    reference_log_probs(reference, texts, temperature=1.3)[0].sum().backward()
    result = dict(model.trainable.named_parameters())
    expected = dict(reference.named_parameters())
    assert list(result) == list(expected)  # the checkpoint's names, and a tied projection once
    for name, parameter in expected.items():
        scale = float(parameter.grad.abs().max())
        assert scale > 0, name
        # Sums of some 100 tokens in another order: 1e-4 of the largest element is 100 times their rounding.
        torch.testing.assert_close(result[name].grad, parameter.grad, rtol=0, atol=1e-4 * scale, msg=name)


@pytest.mark.parametrize(("kind", "spec"), [("dense", SPEC), ("untied", SPEC), ("moe", MOE)])
def test_lora_gradients_reach_every_target(kind: str, spec: Any, load: Callable[..., Qwen3Model], texts: Texts) -> None:
    model = load(kind)
    targets = tuple(f".{target}" for target in names_in(spec.lora_targets, model.trainable))
    names = [
        name for name, part in model.trainable.named_modules() if isinstance(part, nn.Linear) and name.endswith(targets)
    ]
    assert len(names) == spec.tiny.lora_layers
    inject_adapter_in_model(LoraConfig(r=2, target_modules=names, init_lora_weights=False), model.trainable)
    model.score(pad_batch(*texts, pad_token=model.pad_token), temperature=1.0)[0].sum().backward()
    gradients = {name: p.grad for name, p in model.trainable.named_parameters() if p.requires_grad}
    assert len(gradients) == 2 * len(names)
    assert all(gradient is not None and float(gradient.abs().max()) > 0 for gradient in gradients.values())


def test_an_adapter_on_the_output_projection_is_refused(load: Callable[..., Qwen3Model], texts: Texts) -> None:
    model = load("untied")
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["lm_head"]), model.trainable)
    with pytest.raises(RecipeError, match=r"backend\.lora\.targets: got 'lm_head'"):
        model.score(pack_batch(*texts), temperature=1.0)


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"autocast": "bfloat16"}])
def test_16_bit_gives_fp32_log_probs_that_agree_with_the_sampled_logits(
    settings: dict[str, str], load: Callable[..., Qwen3Model], model: Qwen3Model, texts: Texts
) -> None:
    rounded = load(**settings)
    batch = pack_batch(*texts)
    with torch.no_grad():
        exact, _ = model.score(batch, temperature=1.0)
        result, _ = rounded.score(batch, temperature=1.0)
    assert result.dtype is torch.float32
    # bf16 keeps 8 bits, 0.4 %, of hidden numbers; two blocks of it on log-probs of about 6.
    assert 1e-4 < float((result - exact).abs().max()) < 0.5
    prompt, answer = texts[0][0], texts[1][0]
    logits, _ = rounded.next_logits(
        prompt[None],
        positions=torch.arange(len(prompt))[None],
        attention_mask=torch.ones(1, len(prompt), dtype=torch.bool),
        cache=None,
    )
    assert logits.dtype is torch.float32
    # Logits that were rounded to bf16 on the way would all survive this round trip.
    assert not torch.equal(logits, logits.bfloat16().float())
    first = torch.log_softmax(logits[0], dim=0)[answer[0]]
    # The same 16-bit layers on another shape; without rounding of the logits themselves the gap stays this small.
    torch.testing.assert_close(first, result[0], rtol=0, atol=0.05)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_cached_greedy_texts_are_those_of_generate(
    kind: str, load: Callable[..., Qwen3Model], load_reference: Callable[..., Any], texts: Texts
) -> None:
    model, reference = load(kind), load_reference(kind)
    prompts, steps = texts[0], 12
    for row, tokens in enumerate(greedy(model, prompts, steps=steps, keep=[[0, 1, 2]] * steps)):
        expected = reference.generate(
            prompts[row][None],
            attention_mask=torch.ones(1, len(prompts[row]), dtype=torch.int64),
            max_new_tokens=steps,
            min_new_tokens=steps,
            do_sample=False,
        )
        # min_new_tokens forbids the tokens that end a text; the miniature would take none of them either.
        assert tokens == expected[0, len(prompts[row]) :].tolist()


def test_rows_that_go_on_do_not_change_when_others_leave(load: Callable[..., Qwen3Model], texts: Texts) -> None:
    model = load()
    whole = greedy(model, texts[0], steps=8, keep=[[0, 1, 2]] * 8)
    left = greedy(model, texts[0], steps=8, keep=[[0, 1, 2]] * 3 + [[0, 2]] * 2 + [[2]] * 3)
    assert left[0] == whole[0][:5]
    assert left[1] == whole[1][:3]
    assert left[2] == whole[2]


def greedy(model: Qwen3Model, prompts: list[Tensor], *, steps: int, keep: list[list[int]]) -> list[list[int]]:
    """Likeliest tokens of left-padded prompts with a cache; keep: the rows that take each step."""
    longest = max(map(len, prompts))
    tokens = torch.stack([nn.functional.pad(p, (longest - len(p), 0), value=model.pad_token) for p in prompts])
    mask = torch.stack([torch.arange(longest) >= longest - len(p) for p in prompts])
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    cache: Any = None
    alive = list(range(len(prompts)))
    result: list[list[int]] = [[] for _ in prompts]
    for step in range(steps):
        if keep[step] != alive:
            rows = torch.tensor([alive.index(row) for row in keep[step]])
            cache, alive = model.select_cache(cache, rows), keep[step]
            tokens, mask, positions = tokens[rows], mask[rows], positions[rows]
        logits, cache = model.next_logits(tokens, positions=positions, attention_mask=mask, cache=cache)
        assert logits.shape == (len(alive), model.trainable.config.vocab_size)
        assert logits.dtype is torch.float32 and bool(logits.isfinite().all())
        tokens = logits.argmax(dim=1, keepdim=True)
        positions = positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(alive), 1)], dim=1)
        for row, token in zip(alive, tokens[:, 0].tolist(), strict=True):
            result[row].append(token)
    return result


def test_the_plain_forward_is_transformers_own(
    model: Qwen3Model, load_reference: Callable[..., Any], texts: Texts
) -> None:
    tokens = texts[0][0][None]
    with torch.no_grad():
        result, expected = model.trainable(tokens).logits, load_reference()(tokens).logits
    torch.testing.assert_close(result, expected, **TOLERANCE)


def test_flash_attention_gets_the_offsets_that_transformers_would_find(texts: Texts) -> None:
    batch = pack_batch(*texts)
    result = packed_offsets(batch.positions)
    (offsets, _), (longest, _) = prepare_fa_kwargs_from_position_ids(batch.positions)
    assert batch.cu_seqlens is not None
    for key in ("cu_seq_lens_q", "cu_seq_lens_k"):
        assert result[key].dtype is torch.int32
        assert torch.equal(result[key], offsets) and torch.equal(result[key], batch.cu_seqlens)
    assert result["max_length_q"] == result["max_length_k"] == int(longest) == batch.max_length
