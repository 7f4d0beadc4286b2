"""The sampling distribution of tokens, and their log-probs."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from unirl.conformance.claims import claim
from unirl.conformance.fixtures.text_engine import TextEngineCase
from unirl.conformance.verdicts import NotApplicable
from unirl.core.specs.capability import Cap
from unirl.core.types.inputs import distinct
from unirl.core.types.request import Request
from unirl.core.types.track import Track
from unirl.numerics.tokens.replay import per_token, replay_text

DRAWS = 160
"""Samples of a prompt from which a distribution is told."""
SIGMAS = 5.0
"""Standard errors that chance may move a mean by: it does so once in two million times."""


@claim("engine", proves=(Cap.LOG_PROBS_TOKEN, Cap.TEXT_ROLLOUT), track="text")
def test_log_probs_are_those_of_the_model_at_the_temperature(case: TextEngineCase) -> None:
    """The engine's log-prob of every token is the one that training computes for it: over the whole vocabulary, at the
    requested temperature, for each token including the last.

    If it fails: most engines give log-probs at temperature 1, or after top_p and top_k; ask for those of the logits
    that were sampled, before anything is cut off.
    """
    for temperature in (1.0, 0.6):
        _, track = case.generate(sampling={"temperature": temperature, "max_new_tokens": 12})
        result = case.log_probs(track)
        shapes = [(value.dtype, len(value)) for value in result]
        expected = [(torch.float32, length) for length in track.text.lengths]
        assert shapes == expected, f"log-probs: got {shapes}, expected {expected}"
        with torch.no_grad():
            replayed = replay_text(case.model(), track, packing=False, with_entropy=False)
        gap = (replayed.log_probs.cpu() - per_token(track.text, "log_probs").cpu()).abs()[replayed.valid.cpu()]
        case.record_gap(f"log-prob gap at {temperature:g}", gap)


@claim("engine", proves=Cap.TEXT_ROLLOUT, track="text")
def test_tokens_are_drawn_at_the_temperature(case: TextEngineCase) -> None:
    """First tokens are distributed as softmax(logits / temperature) says: over many samples their mean log-prob under
    that distribution is its negative entropy, within five standard errors.

    If it fails: the engine samples at another temperature, from fewer tokens (a default top_k or top_p of the
    checkpoint's generation_config.json), or with its own penalty.
    """
    for temperature in (0.5, 2.0):
        request, track = _first_tokens(case, temperature=temperature)
        scores = _scores(case, request, temperature=temperature)
        drawn = scores.gather(1, _tokens(track)[:, None]).squeeze(1)
        chances = scores.exp()
        means = (chances * scores.nan_to_num(neginf=0.0)).sum(dim=1)
        variances = (chances * (scores - means[:, None]).square()).sum(dim=1)
        off = float((drawn - means).sum() / variances.sum().sqrt())
        case.record(f"standard errors off at {temperature:g}", off, bound=SIGMAS)


@claim("engine", proves=Cap.TEXT_ROLLOUT, track="text")
def test_temperature_0_is_greedy(case: TextEngineCase) -> None:
    """At temperature 0 every token is the most likely one after the tokens before it, and its log-prob that of the
    plain logits: evaluation means the same everywhere.

    If it fails: look for a temperature that is raised to a smallest value, or for log-probs of the greedy choice, which
    are all 0.
    """
    model = case.model()
    request = case.deterministic_request(model)
    with case.engine(model) as engine:
        track = case.sample(engine, request)
    case.check_made_by(model, request, track, name="off the likeliest token")


@claim("engine", proves=Cap.TEXT_ROLLOUT, track="text")
def test_top_k_and_top_p_keep_the_likeliest_tokens(case: TextEngineCase) -> None:
    """With `top_k` tokens come from the k most likely, with `top_p` from the most likely that reach this probability,
    and from several of them.

    If it fails: hand both on to the engine; of a nucleus, the token that reaches `top_p` belongs to it.
    """
    settings: dict[str, dict[str, Any]] = {"top_k 3": {"top_k": 3}, "top_p 0.4": {"top_p": 0.4}}
    for name, setting in settings.items():
        request, track = _first_tokens(case, temperature=1.0, **setting)
        scores = _scores(case, request, temperature=1.0)
        ranked, order = scores.sort(dim=1, descending=True)
        before = ranked.exp().cumsum(dim=1) - ranked.exp()
        # Rounding decides for a token whose mass before it is the bound to six digits.
        kept = before < setting.get("top_p", 1.0) + 1e-6
        kept[:, setting.get("top_k", kept.shape[1]) :] = False
        allowed = torch.zeros_like(kept).scatter(1, order, kept)
        drawn = _tokens(track)
        outside = int((~allowed.gather(1, drawn[:, None])).sum())
        assert not outside, f"{name}: {outside} of {len(drawn)} tokens are not of the likeliest"
        case.record(f"distinct tokens, {name}", len(drawn.unique()))
        assert len(drawn.unique()) > 2, f"{name}: only {len(drawn.unique())} different tokens came for two prompts"


@claim("engine", proves=(Cap.LOG_PROBS_TOKEN, Cap.TEXT_ROLLOUT), track="text")
def test_log_probs_cover_the_whole_vocabulary(case: TextEngineCase) -> None:
    """With `top_k` a log-prob still is that of the whole distribution: one over the tokens that are left would be
    another policy's. An engine that has no other may give none then; training rejects `top_k` where it needs them.

    If it fails: take log-probs from the logits before they are cut off, or leave them out.
    """
    request, track = _first_tokens(case, temperature=1.0, top_k=3)
    if track.text.log_probs is None:
        raise NotApplicable(f"engine {case.spec.name!r} gives no log-probs with top_k")
    expected = _scores(case, request, temperature=1.0).gather(1, _tokens(track)[:, None]).squeeze(1)
    result = torch.cat(list(case.log_probs(track))).cpu()
    case.record_gap("log-prob gap", (result - expected).abs())


@claim("engine", proves=Cap.TEXT_ROLLOUT, track="text")
def test_prompts_are_read_as_tokens(case: TextEngineCase) -> None:
    """The engine continues the prompt tokens of the request, whatever the prompt's words are: with the tokens of
    another prompt under the same words, the most likely completion is that of the tokens.

    If it fails: send token ids; a server that tokenizes the words again may put its own template around them.
    """
    model = case.model()
    request = case.deterministic_request(model)
    tokens = request.text.prompt_tokens
    # The first prompt's tokens, less the last but one, under the words of all prompts and over the first one's media.
    cut = torch.cat([tokens[0][:-2], tokens[0][-1:]])
    if len(cut) == len(tokens[0]):
        raise NotApplicable("the prompts of the miniature have a single token")
    request = case.with_text(request, prompt_tokens=(cut,) * request.num_rows)
    inputs = dataclasses.replace(request.inputs, media=request.inputs.media[:1] * request.num_rows)
    request = dataclasses.replace(request, inputs=inputs)
    with case.engine(model) as engine:
        track = case.sample(engine, request)
    case.check_made_by(model, request, track, name="off the text of these tokens")


def _first_tokens(case: TextEngineCase, **sampling: Any) -> tuple[Request, Track]:
    """Completions of one token."""
    return case.generate(sampling={"max_new_tokens": 1, **sampling}, samples_per_prompt=DRAWS)


def _tokens(track: Track) -> Tensor:
    return torch.cat([tokens[:1].cpu() for tokens in track.text.tokens])


def _scores(case: TextEngineCase, request: Request, *, temperature: float) -> Tensor:
    """[N, V] log-probs of the first token of each row, by the model, on the CPU."""
    rows, index = distinct(request.inputs)
    nothing = torch.zeros(1, dtype=torch.int64)
    logits = case.logits(case.model(), request.select(rows), [nothing] * len(rows)).cpu()
    return torch.log_softmax(logits.double() / temperature, dim=1)[index]
