"""Tokens chosen from some of the vocabulary, against the softmax written out over what was allowed."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from tiny_text_model import TinyTextModel
from unirl.core.errors import BatchError, EchoMismatch, RunFailed
from unirl.core.roles import OutputHead
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.core.types.request import Request, TextRequest
from unirl.core.types.rollout import verify_echo
from unirl.core.types.sampling import TextSamplingConfig
from unirl.numerics.tokens.divergence import dense_divergence, token_divergence
from unirl.numerics.tokens.log_probs import token_log_probs
from unirl.numerics.tokens.replay import per_sample, replay_text
from unirl.numerics.tokens.restricted import allowed_tokens, narrowed_logits, target_restrictions, trained_tokens
from unirl.numerics.tokens.rollout import GeneratedText, generate_text, text_track

V, D, T = 13, 5, 7
ALLOWED = {1: [2, 7, 11], 2: [4], 4: [0, 3], 5: [2, 7, 11], 6: [9]}
"""Three sets, one of them twice, and two forced targets."""
TARGETS = torch.tensor([5, 11, 4, 1, 0, 2, 9])


def numbers(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def allowed():
    return {place: torch.tensor(ids) for place, ids in ALLOWED.items()}


def log_softmax_of(hidden, weight, bias, place, temperature):
    """Tokens and log-probs of what target `place` was chosen from."""
    ids = ALLOWED.get(place, [*range(V)])
    logits = hidden[place] @ weight[ids].T + (0 if bias is None else bias[ids])
    return ids, torch.log_softmax(logits / temperature, dim=0)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk", [2, None])
def test_log_probs_and_entropies_are_over_what_was_allowed(with_bias, chunk):
    """fp64 on both sides: the tolerance is that of a sum in another order."""
    hidden, weight, bias = numbers(T, D, seed=0), numbers(V, D, seed=1), numbers(V, seed=2) if with_bias else None
    for one in (hidden, weight, *([bias] if with_bias else [])):
        one.requires_grad_()
    leaves = [one for one in (hidden, weight, bias) if one is not None]
    result, entropy = token_log_probs(
        hidden, weight, TARGETS, temperature=0.7, bias=bias, allowed=allowed(), with_entropy=True, chunk=chunk
    )
    expected, spread = [], []
    for place in range(T):
        ids, scores = log_softmax_of(hidden, weight, bias, place, 0.7)
        expected.append(scores[ids.index(int(TARGETS[place]))])
        spread.append(-(scores.exp() * scores).sum())
    factors = numbers(2, T, seed=3)
    mine = torch.autograd.grad((factors * torch.stack([result, entropy])).sum(), leaves)
    its = torch.autograd.grad((factors * torch.stack([torch.stack(expected), torch.stack(spread)])).sum(), leaves)
    torch.testing.assert_close(result, torch.stack(expected), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, torch.stack(spread), rtol=1e-12, atol=1e-12)
    for one, other in zip(mine, its, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    assert not result.detach()[[2, 6]].any() and not entropy.detach()[[2, 6]].any()


def test_forced_targets_get_no_gradient_even_from_nan():
    hidden, weight = numbers(T, D, seed=0).requires_grad_(), numbers(V, D, seed=1).requires_grad_()
    result, _ = token_log_probs(hidden, weight, TARGETS, allowed=allowed())
    factors = torch.ones(T, dtype=torch.float64)
    factors[[2, 6]] = math.nan
    (factors * result).sum().backward()
    assert bool(hidden.grad.isfinite().all()) and bool(weight.grad.isfinite().all())
    assert float(hidden.grad[[2, 6]].abs().max()) == 0


def test_16_bit_weights_score_in_fp32_and_keep_their_dtype():
    """The factors are the same bf16 numbers, summed in fp32: 1e-6 of logits up to some ten."""
    hidden, weight = (numbers(*shape, seed=seed).bfloat16() for seed, shape in enumerate(((T, D), (V, D))))
    weight.requires_grad_()
    result, _ = token_log_probs(hidden, weight, TARGETS, allowed=allowed())
    expected, _ = token_log_probs(hidden.double(), weight.detach().double(), TARGETS, allowed=allowed())
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=2e-6)
    result.sum().backward()
    assert weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["forward", "reverse", "jensen"])
@pytest.mark.parametrize("top_k", [None, 2])
def test_divergences_are_over_what_was_allowed(kind, top_k):
    hidden, weight = numbers(T, D, seed=0).requires_grad_(), numbers(V, D, seed=1).requires_grad_()
    teacher = OutputHead(hidden=numbers(T, 3, seed=4), weight=numbers(V, 3, seed=5))
    result, log_probs = token_divergence(
        hidden, weight, TARGETS, teacher=teacher, kind=kind, beta=0.3, top_k=top_k, temperature=0.7, allowed=allowed()
    )
    for place in range(T):
        ids, scores = log_softmax_of(hidden, weight, None, place, 0.7)
        _, theirs = log_softmax_of(teacher.hidden, teacher.weight, None, place, 0.7)
        expected = dense_divergence(scores[None].detach(), theirs[None], kind=kind, beta=0.3, top_k=top_k)
        torch.testing.assert_close(result[place].detach(), expected[0], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(log_probs[place], scores[ids.index(int(TARGETS[place]))].detach())
    assert not log_probs.requires_grad
    # Central differences: truncation and rounding are 1e-8 for steps of 1e-5.
    direction = numbers(V, D, seed=6)
    (gradient,) = torch.autograd.grad(result.sum(), weight)

    def at(step):
        moved = weight.detach() + step * direction
        settings = {"kind": kind, "beta": 0.3, "top_k": top_k, "temperature": 0.7, "allowed": allowed()}
        return float(token_divergence(hidden.detach(), moved, TARGETS, teacher=teacher, **settings)[0].sum())

    slope = (at(1e-5) - at(-1e-5)) / 2e-5
    assert float((gradient * direction).sum()) == pytest.approx(slope, abs=1e-7)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({9: [1]}, r"got target 9, expected 0 to 6"),
        ({1: []}, r"got \[\] for target 1, expected one or more token ids below 13"),
        ({1: [11, 13]}, r"got \[11, 13\] for target 1"),
        ({1: [2, 7]}, r"target 1 is token 11, expected one of \[2, 7\]"),
    ],
)
def test_restrictions_that_cannot_be_are_refused(bad, words):
    sets = {place: torch.tensor(ids, dtype=torch.int64) for place, ids in bad.items()}
    with pytest.raises(ValueError, match=words):
        token_log_probs(numbers(T, D, seed=0), numbers(V, D, seed=1), TARGETS, allowed=sets)


class Ruled(TinyTextModel):
    """Texts begin with a or b, then comes an e; with the option `double` the third token is the first again."""

    spec = dataclasses.replace(
        TinyTextModel.spec, restricts=frozenset({"text"}), token_options=frozenset({"text"}), options={"text": "-:-"}
    )

    def allowed(self, tokens, *, options):
        result = {0: [1, 2], 1: [5]}
        if options["double"] and len(tokens):
            result[2] = [int(tokens[0])]
        return {place: torch.tensor(ids) for place, ids in result.items() if place <= len(tokens)}

    def next_logits(self, tokens, *, options, **settings):
        assert options == {"double": True}
        return super().next_logits(tokens, **settings)


def request(model, **settings):
    sampling = TextSamplingConfig(**{"max_new_tokens": 6, "options": {"double": True}, **settings})
    prompts = model.prompt_tokens(Inputs.of_texts(("a", "cab", "bb", "b")), sampling=sampling)
    return TextRequest(
        sampling=sampling,
        prompt_tokens=tuple(prompts),
        stop_tokens=(0,),
        seeds=(5, 6, 7, 8),
        options=(("double", True),),
    )


def asked_of(wanted: TextRequest):
    ids = tuple(f"s{row}" for row in range(wanted.num_rows))
    return Request(
        track="text",
        sample_ids=ids,
        group_ids=ids,
        inputs=Inputs.of_texts(("",) * len(ids)),
        metadata=({},) * len(ids),
        params=wanted,
        seed=0,
        rollout=0,
        policy_version=0,
    )


def track_of(generated: GeneratedText, wanted: TextRequest):
    media = Media(kind="text", values=("",) * wanted.num_rows)
    return text_track(asked_of(wanted), generated=generated, media=media, version=0)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6}, {"top_k": 1}, {"top_p": 0.01}, {"temperature": 0.0}])
def test_texts_follow_the_rules_and_say_what_was_forced(settings):
    model, wanted = Ruled(dtype=torch.float32), request(Ruled(), **settings)
    result = generate_text(model, wanted)
    assert result.options == (("double", True),)
    for tokens, mask, log_probs in zip(result.tokens, result.mask, result.log_probs, strict=True):
        assert int(tokens[0]) in (1, 2) and int(tokens[1]) == 5 and int(tokens[2]) == int(tokens[0])
        assert mask.tolist() == [True, False, False, *[True] * (len(tokens) - 3)]
        assert log_probs[1:3].tolist() == [0.0, 0.0]
    joined = GeneratedText.concat([generate_text(model, part) for part in wanted.split([1, 3])])
    assert all(torch.equal(*pair) for pair in zip(joined.mask, result.mask, strict=True))
    if wanted.sampling.temperature:
        replayed = replay_text(model, track_of(result, wanted), packing=False)
        rows = per_sample(replayed.log_probs.detach(), track_of(result, wanted).text)
        # fp32: a cache adds up as a forward over whole texts does.
        torch.testing.assert_close(torch.cat(rows), torch.cat(result.log_probs), rtol=0, atol=1e-6)
        assert torch.equal(replayed.valid[:, :3], torch.tensor([[True, False, False]] * 4))


def test_other_options_than_the_requests_are_caught_by_the_echo():
    model, wanted = Ruled(dtype=torch.float32), request(Ruled())
    track = track_of(generate_text(model, wanted), wanted)
    asked = dataclasses.replace(asked_of(wanted), inputs=track.inputs)
    verify_echo(asked, track)
    other = dataclasses.replace(track, segment=dataclasses.replace(track.text, options=()))
    with pytest.raises(EchoMismatch, match=r"text.options: the request says \{'double': True\}, the engine used \{\}"):
        verify_echo(asked, other)


def test_a_stored_token_that_was_not_allowed_is_refused():
    model, options = Ruled(), {"double": True}
    assert trained_tokens(TinyTextModel(), [torch.tensor([1])], options={}) is None
    (mask,) = trained_tokens(model, [torch.tensor([2, 5, 2, 3])], options=options)
    assert mask.tolist() == [True, False, False, True]
    words = r"row 1 has token 4 at position 1, expected \[5\], which model 'letters' allows there"
    with pytest.raises(BatchError, match=words):
        target_restrictions(model, [torch.tensor([1, 5]), torch.tensor([1, 4])], options=options)
    wanted = request(model)
    track = track_of(generate_text(Ruled(dtype=torch.float32), wanted), wanted)
    tokens = (torch.tensor([3, 5, 3]), *track.text.tokens[1:])
    segment = dataclasses.replace(track.text, tokens=tokens, mask=None, log_probs=None)
    with pytest.raises(BatchError, match=r"row 0 has token 3 at position 0, expected \[1, 2\]"):
        replay_text(model, dataclasses.replace(track, segment=segment), packing=True)


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ({0: torch.tensor([], dtype=torch.int64)}, "gives position 0 no token, expected one or more"),
        ({4: torch.tensor([1])}, "gives position 4 of a completion of 2 tokens, expected 0 to 2"),
        ({0: torch.tensor([1.0])}, r"gives position 0 torch.float32 \[1\], expected 1-D int64 token ids"),
        ({0: torch.tensor([-1])}, "gives position 0 token -1, expected ids from 0"),
    ],
)
def test_a_models_impossible_rules_are_refused(sets, words):
    model = Ruled()
    model.allowed = lambda tokens, *, options: sets
    with pytest.raises(RunFailed, match=words):
        allowed_tokens(model, torch.tensor([1, 5]), options={})
    with pytest.raises(RunFailed, match=r"gives token 20, expected ids below 11, the size of its vocabulary"):
        narrowed_logits(torch.zeros(2, 11), [None, torch.tensor([3, 20])], model="letters")
