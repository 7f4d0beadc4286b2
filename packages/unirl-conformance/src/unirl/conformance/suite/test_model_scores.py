"""Log-probs of a completion: one function, whether tokens are scored or generated, padded, packed, alone or with a
cache."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from unirl.conformance.claims import claim
from unirl.conformance.fixtures.text_model import PIECES, SCORE, TextModelCase, left_padded, prefilled
from unirl.conformance.verdicts import NotApplicable
from unirl.core.roles import TextModel
from unirl.core.specs.capability import Cap
from unirl.numerics.tokens.replay import per_token

TEMPERATURES = (0.6, 1.7)
"""Neither of them 1, at which a temperature that is left out does not show."""


@claim("model", proves=Cap.TEXT_STAGE, track="text")
def test_scores_are_the_log_softmax_of_the_plain_logits(case: TextModelCase) -> None:
    """`score` gives log softmax(logits / temperature) at each token that followed, with the logits that `next_logits`
    gives after the completion before it, and the entropy of that distribution, both in fp32.

    If it fails: take the logits at the place before each target, divide them by the temperature before the softmax, and
    compute both in fp32 whatever the weights are in.
    """
    with case.model() as model:
        prompts, tokens = case.pieces(model)
        prefixes = [torch.cat([p, t[:end]]) for p, t in zip(prompts, tokens, strict=True) for end in range(len(t))]
        numbers = [number for number, row in zip(PIECES, tokens, strict=True) for _ in row]
        logits = case.next_logits(model, prefixes, numbers)
        assert logits.dtype == torch.float32, f"next_logits gives {logits.dtype}; float32 is promised"
        targets = torch.cat(tokens).to(logits.device)
        for temperature in TEMPERATURES:
            expected = torch.log_softmax(logits.double() / temperature, dim=1)
            result, entropy = model.score(case.batch(model), temperature=temperature, with_entropy=True)
            assert entropy is not None, "`score` returned no entropy, although it was requested"
            for name, values in (("log-probs", result), ("entropies", entropy)):
                assert values.dtype == torch.float32 and values.shape == targets.shape, (
                    f"{name} are {values.dtype} {list(values.shape)}; float32 {list(targets.shape)} is promised"
                )
            _hold(case, f"log-probs at {temperature:g}", result, expected.gather(1, targets[:, None]).squeeze(1))
            _hold(case, f"entropy at {temperature:g}", entropy, -(expected.exp() * expected).sum(dim=1))


@claim("model", track="text")
def test_padded_packed_and_single_rows_score_alike(case: TextModelCase) -> None:
    """A completion has the same log-probs padded beside others, alone, and, where the model says that it packs, in a
    row with others without padding: rows never see each other, and padding is never seen.

    If it fails: mask padding, count positions from 0 in every row, and keep the samples of a packed row apart by
    positions that start again, in each attention implementation.
    """
    with case.model() as model:
        lengths = case.batch(model).lengths
        order = list(range(len(lengths)))
        alone = torch.cat([_scores(case, model, [row]) for row in order])
        _hold(case, "padded", _scores(case, model, order), alone)
        mixed = _scores(case, model, order[::-1])
        parts = mixed.split(lengths[::-1])
        _hold(case, "padded in another order", torch.cat([*reversed(parts)]), alone)
        if model.packs:
            packed = model.score(case.batch(model, packed=True), temperature=1.0)[0]
            _hold(case, "packed", packed, alone)


@claim("model", track="text")
def test_cached_logits_are_those_of_the_whole_text(case: TextModelCase) -> None:
    """Token by token with its cache the model gives the logits that it gives for the whole completion at once: also
    when prompts of different lengths are padded on the left, when rows leave, and when one cache serves several rows.

    If it fails: look at positions after padding on the left, at the mask over what is cached, and at whether
    `select_cache` picks rows, more than once if asked, from every layer's keys and values.
    """
    with case.model() as model:
        prompts, tokens = case.pieces(model)
        batch = left_padded(model, prompts)
        mask, positions = batch["attention_mask"], batch["positions"]
        logits, cache = prefilled(model, **batch, conditions=case.conditions(model, PIECES))
        _hold(case, "after the prompts", logits, case.next_logits(model, prompts, PIECES))
        numbers = list(PIECES)
        last, texts = positions[:, -1], list(prompts)
        # Rows leave, and one continues twice.
        for step, rows in enumerate(([0, 1, 2, 3, 4], [4, 0, 3, 3], [1, 2])):
            index = torch.tensor(rows, device=case.device)
            cache = model.select_cache(cache, index)
            last, mask = last[index] + 1, torch.cat([mask[index], mask.new_ones(len(rows), 1)], dim=1)
            drawn = torch.stack([tokens[row][step % len(tokens[row])] for row in rows])
            texts = [torch.cat([texts[row], drawn[place : place + 1]]) for place, row in enumerate(rows)]
            numbers = [numbers[row] for row in rows]
            logits, cache = model.next_logits(
                drawn[:, None].to(case.device), positions=last[:, None], attention_mask=mask, cache=cache
            )
            _hold(case, f"after {step + 1} tokens with a cache", logits, case.next_logits(model, texts, numbers))


@claim("model", track="text")
def test_own_text_replays_at_ratio_1(case: TextModelCase) -> None:
    """Completions that the model generated with its cache have the same log-probs when they are scored again with
    gradients on, padded and packed: the ratio of a first update is 1 up to rounding.

    If it fails while the claims about scores and caches hold: look for dropout, random draws, or another attention
    kernel or precision where gradients are on.
    """
    model = case.learner()
    with torch.no_grad():
        track = case.rollout(model)
    expected = per_token(track.text, "log_probs").to(case.device)
    for packing in (False, True):
        replayed = case.replay(model, packing=packing)(track)
        assert replayed.log_probs.requires_grad, "replayed log-probs carry no gradient"
        name = "packed" if packing else "padded"
        _hold(case, f"log-prob gap, {name}", replayed.log_probs.detach(), expected)


@claim("model", track="text")
def test_packing_does_not_change_the_gradient(case: TextModelCase) -> None:
    """The gradient of a batch is the same padded and packed.

    If it fails while both score alike: look at a custom backward of the attention or of the log-probs.
    """
    model = case.learner()
    if not model.packs:
        raise NotApplicable(f"model {case.spec.name!r} takes no packed batches")
    result: list[list[Tensor]] = []
    for batch in (case.batch(model), case.batch(model, packed=True)):
        model.trainable.zero_grad()
        log_probs = model.score(batch, temperature=1.0)[0]
        (log_probs * torch.linspace(-1, 2, len(log_probs), device=log_probs.device)).sum().backward()
        grads = [param.grad for param in model.trainable.parameters()]
        result.append([grad.detach().double().clone() for grad in grads if grad is not None])
    size = sum(float(grad.square().sum()) for grad in result[0]) ** 0.5
    assert size > 0, "the log-probs have no gradient at all"
    apart = sum(float((one - other).square().sum()) for one, other in zip(*result, strict=True)) ** 0.5
    # Relative, in norm: fp32 sums in another order differ by about 1e-6, more where a gradient nearly cancels.
    case.record("relative gap in norm", apart / size, bound=1e-4)


@claim("model", track="text")
def test_scores_are_over_the_allowed_tokens(case: TextModelCase) -> None:
    """Where the token of a batch was chosen from some (`TokenBatch.allowed`), its log-prob and entropy are those of a
    softmax over these alone; of a single one they are 0. All other tokens keep theirs.

    If it fails: hand `allowed` of the batch to `token_log_probs`, as `unirl.model_host.tokens` does.
    """
    if not case.spec.restricts:
        raise NotApplicable(f"model {case.spec.name!r} restricts no tokens")
    with case.model() as model:
        batch = case.batch(model)
        prompts, texts = case.pieces(model)
        prefixes, numbers = list[Tensor](), list[int]()
        for prompt, text, number in zip(prompts, texts, PIECES, strict=True):
            prefixes += [torch.cat([prompt, text[:end]]) for end in range(len(text))]
            numbers += [number] * len(text)
        logits = case.next_logits(model, prefixes, numbers).double().cpu()
        targets = batch.targets.cpu()
        # In turns: all tokens, the target alone, and the target with two others.
        allowed = {
            place: torch.tensor(sorted({int(target), *((0, 1) if place % 3 == 2 else ())}))
            for place, target in enumerate(targets)
            if place % 3
        }
        result, entropy = model.score(dataclasses.replace(batch, allowed=allowed), temperature=0.7, with_entropy=True)
    assert entropy is not None
    kept = torch.zeros_like(logits, dtype=torch.bool)
    for place in range(len(targets)):
        kept[place, allowed.get(place, slice(None))] = True
    expected = torch.log_softmax(logits.masked_fill(~kept, -torch.inf) / 0.7, dim=1)
    _hold(case, "log-probs", result, expected.gather(1, targets[:, None]).squeeze(1))
    _hold(case, "entropies", entropy, -(expected.exp() * expected.masked_fill(~kept, 0.0)).sum(dim=1))


def _scores(case: TextModelCase, model: TextModel, rows: list[int]) -> Tensor:
    return model.score(case.batch(model, rows), temperature=1.0)[0]


def _hold(case: TextModelCase, name: str, result: Tensor, expected: Tensor) -> None:
    assert result.shape == expected.shape, f"{name}: got {list(result.shape)}, expected {list(expected.shape)}"
    gap = (result.double() - expected.to(result.device).double()).abs().max()
    case.record(name, float(gap), bound=SCORE)
