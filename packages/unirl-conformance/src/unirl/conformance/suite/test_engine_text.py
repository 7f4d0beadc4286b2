"""The track of a text request: samples, tokens, decoded text and finish reasons."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import torch
from unirl.conformance.claims import claim
from unirl.conformance.fixtures.text_engine import TextEngineCase
from unirl.conformance.verdicts import NotApplicable
from unirl.core.roles import TextModel
from unirl.core.specs.capability import Cap
from unirl.core.types.batch import same
from unirl.core.types.request import Request
from unirl.core.types.rollout import verify_echo
from unirl.core.types.track import Status, Track
from unirl.numerics.tokens.rollout import text_conditions

MIXED = (0, 3, 1, 4, 2, 5)
"""Rows of a request so that its groups take turns."""
LONG: dict[str, Any] = {"max_new_tokens": 12}
"""Long enough that a completion with a stop in it is seen to end at it."""


@claim("engine", proves=Cap.TEXT_ROLLOUT, track="text")
def test_every_text_comes_back_with_its_lineage(case: TextEngineCase) -> None:
    """Every requested completion comes back once, in the order of the request, with its ids, group, prompt, metadata
    and parent, and at weight 1. It continues exactly the prompt tokens of the request, at its temperature, and both are
    echoed. A greedy completion is the most likely one for the prompt of its row.

    The request's groups take turns, so an engine that sorts by prompt and forgets to sort back is caught.

    If it fails: carry the fields of the request over row by row, see `unirl.numerics.tokens.rollout.text_track`; send
    token ids to the engine, never text that it tokenizes again.
    """
    model = case.model()
    request = case.request(model, sampling={"temperature": 0.7}).select(MIXED)
    with case.engine(model) as engine:
        request = dataclasses.replace(request, policy_version=engine.version)
        track = engine.generate(request)
        greedy = case.deterministic_request(model).select(MIXED)
        likeliest = case.sample(engine, greedy)
    case.check_lineage(request, track)
    verify_echo(request, track)
    case.check_made_by(model, greedy, likeliest, name="off the likeliest text")


@claim("engine", proves=(Cap.MEDIA_REFS, Cap.TEXT_ROLLOUT), track="text")
def test_texts_are_about_their_own_media(case: TextEngineCase) -> None:
    """One prompt over different images is as many prompts, also where all have the same tokens: each text is the
    likeliest one for the image of its row, and the conditions that come back hold each input once.

    If it fails: group rows by `unirl.core.types.inputs.distinct`, keep encodings by id, text and media, and prefixes by
    tokens and media.
    """
    model = case.model()
    if not model.spec.inputs.get(case.track):
        raise NotApplicable(f"model {model.spec.name!r} takes no media")
    if why := model.spec.lacks_media(case.spec):
        raise NotApplicable(why)
    prompts = ("what is it?",) * 4
    request = case.request(model, sampling={"temperature": 0.0}, prompts=prompts, samples_per_prompt=1)
    groups = [
        [row for row in range(len(prompts)) if torch.equal(request.text.prompt_tokens[row], tokens)]
        for tokens in request.text.prompt_tokens
    ]
    case.record("prompts with the same tokens", max(map(len, groups)))
    with case.engine(model) as engine:
        # Sent twice, because what is wrong may be what is kept.
        for rows in ((0, 1, 2, 3), (3, 1, 0, 2)):
            asked = request.select(rows)
            track = case.sample(engine, asked)
            case.check_made_by(model, asked, track, name="off the text about its image")
            if case.provides(Cap.CONDITIONS):
                expected = text_conditions(model, asked.inputs, sampling=asked.text.sampling)
                result = track.conditions["positive"].to("cpu")
                assert expected is not None
                assert same(result.expanded(), expected.to("cpu").expanded()), "conditions are of other inputs"
                counts = {name: len(value) for name, value in result.values.items()}
                assert set(counts.values()) == {len(rows)}, f"{len(rows)} inputs are distinct, and {counts} came back"


@claim("engine", proves=Cap.TEXT_ROLLOUT, track="text")
def test_texts_decode_from_their_tokens(case: TextEngineCase) -> None:
    """Tokens are int64 token ids of the model, and the text passed to rewards is their decoded form, row by row,
    without special tokens.

    If it fails: keep the token ids that the engine drew, and decode those with the model's `texts`.
    """
    _, track = case.generate(sampling=LONG)
    for tokens in track.text.tokens:
        assert tokens.dtype == torch.int64 and tokens.ndim == 1, f"tokens are {tokens.dtype} {list(tokens.shape)}"
    reply = case.model().texts([tokens.cpu() for tokens in track.text.tokens])
    assert track.media is not None, "no texts came back"
    for sample, result, expected in zip(track.sample_ids, track.media.texts, reply, strict=True):
        assert result == expected, f"the tokens of {sample!r} say {expected!r}; its text is {result!r}"


@claim("engine", proves=Cap.TEXT_ROLLOUT, track="text")
def test_a_text_that_reaches_its_limit_is_truncated(case: TextEngineCase) -> None:
    """No completion is longer than `max_new_tokens`. One stopped by the limit is `TRUNCATED` and has exactly that
    length; one that ended by itself is `COMPLETED`, even with its last possible token.

    If it fails: compare the last token with the request's stop tokens; look for a limit of the engine's own, as its
    context length.
    """
    for longest in (1, 5):
        # A third of all tokens end a completion, so that both ends are there.
        request, track = case.generate(sampling={"max_new_tokens": longest, "stop_token_ids": _third(case)})
        _check_ends(case, request, track)
        states = Counter(track.status)
        case.record(f"truncated of {track.num_rows} at {longest}", states[Status.TRUNCATED])


@claim("engine", proves=Cap.TEXT_ROLLOUT, track="text")
def test_stop_tokens_end_a_text(case: TextEngineCase) -> None:
    """A completion ends with the first stop token of the request, whether the model's or from `stop_token_ids`. It is
    the last token, and is trained on.

    If it fails: hand `stop_tokens` of the request to the engine, and keep the token that ended a completion: engines
    drop it unless they are told otherwise.
    """
    model = case.model()
    request = case.request(model, sampling={**LONG, "stop_token_ids": _third(case)})
    with case.engine(model) as engine:
        track = case.sample(engine, request)
        _check_ends(case, request, track)
        ended = sum(status is Status.COMPLETED for status in track.status)
        assert ended, "a third of all tokens end a text, and none of six texts ended"
        # Only the model's own: those that the engine does not know from elsewhere.
        own = case.with_text(request, stop_tokens=tuple(_third(case)))
        _check_ends(case, own, case.sample(engine, own))


@claim("engine", proves=Cap.TEXT_ROLLOUT, track="text")
def test_stop_strings_end_a_text_and_are_removed(case: TextEngineCase) -> None:
    """A completion ends with the token that completes a stop string, and is `COMPLETED`. The tokens of the string are
    kept, because they were sampled and are trained on; the text passed to rewards ends before it.

    If it fails: look for the string in the completion so far, not only in the newest token, and cut the completion,
    not the tokens.
    """
    model = case.model()
    _, free = case.generate(sampling=LONG)
    assert free.media is not None
    # Letters that the model likes, so that many completions have one wherever the engine takes its chance from.
    letters = Counter(
        letter for text in free.media.texts for letter in text if letter.isprintable() and letter != "\ufffd"
    )
    stops = [letter for letter, _ in letters.most_common(8)]
    assert stops, f"six texts have not a single letter: {free.media.texts}"
    request, track = case.generate(sampling={**LONG, "stop": stops}, samples_per_prompt=12)
    assert track.media is not None
    ended = 0
    rows = zip(track.sample_ids, track.text.tokens, track.media.texts, track.status, strict=True)
    for sample, tokens, seen, status in rows:
        whole, before = model.texts([tokens.cpu(), tokens[:-1].cpu()])
        early = [stop for stop in stops if stop in before]
        assert not early, f"{sample!r} went on after the stop string {early[0]!r}: {whole!r}"
        hidden = [stop for stop in stops if stop in seen]
        assert not hidden, f"the text of {sample!r} shows the stop string {hidden[0]!r}: {seen!r}"
        if any(stop in whole for stop in stops):
            ended += 1
            assert status is Status.COMPLETED, f"{sample!r} ended with a stop string, and is {status.name}"
            cut = min(whole.find(stop) for stop in stops if stop in whole)
            assert seen == whole[:cut], f"{sample!r} says {whole!r}, and its text is {seen!r}"
        else:
            assert seen == whole, f"{sample!r} says {whole!r}, and its text is {seen!r}"
    case.record(f"texts of {request.num_rows} that a stop string ended", ended)
    assert ended, f"none of {request.num_rows} texts had one of {stops}"


@claim("engine", proves=Cap.TEXT_ROLLOUT, track="text")
def test_texts_of_a_group_differ(case: TextEngineCase) -> None:
    """The samples of a prompt are drawn independently: a group of equal completions carries no gradient.

    If it fails: give every sample its own seed, `seeds` of the request; an engine that is given one seed for a
    prompt with n samples may draw one completion n times.
    """
    _, track = case.generate(sampling=LONG)
    for group, rows in track.groups().items():
        distinct = {tuple(track.text.tokens[row].tolist()) for row in rows}
        assert len(distinct) > 1, f"all {len(rows)} texts of {group!r} are one"


@claim("engine", proves=(Cap.SEEDS, Cap.TEXT_ROLLOUT), track="text", own_engine=True)
def test_the_same_seeds_give_the_same_texts(case: TextEngineCase) -> None:
    """An engine with seeded sampling gives each sample the completion of its seed: in one piece, in pieces of any size
    (even splitting groups), in another order, repeated, or on a new engine; another rollout or seed gives others.
    Resumed runs, retries and any number of ranks depend on it.

    If it fails: draw by `seeds` of the request, number k of a stream for token k, and let nothing look at the place of
    a row or at what was generated before.
    """
    model = case.model()
    request, whole = case.generate(sampling=LONG)
    with case.engine(model) as engine:
        pieces = [case.sample(engine, piece) for piece in request.split([2, 3, 1])]
        backwards = case.sample(engine, request.select(range(request.num_rows - 1, -1, -1)))
        others = {
            name: case.sample(engine, case.request(model, sampling=LONG, **{name: number}))
            for name, number in (("rollout", 6), ("seed", 12))
        }
        again = case.sample(engine, request)
    joined = type(whole).concat(pieces)
    assert joined.sample_ids == request.sample_ids
    ordered = backwards.select(range(request.num_rows - 1, -1, -1))
    for how, track in (("in pieces", joined), ("in another order", ordered), ("sent again", again)):
        case.record(f"share of texts that differ {how}", case.moved(track, whole), bound=0.0)
    for name, track in others.items():
        assert case.moved(track, whole) > 0.5, f"another {name} gives the same texts"


def _third(case: TextEngineCase) -> list[int]:
    """Every third token of the model, as many as have an id below 256."""
    return list(range(1, min(256, _vocabulary(case.model())), 3))


def _vocabulary(model: TextModel) -> int:
    start = torch.tensor([[model.stop_tokens[0]]], device=model.device)
    mask = torch.ones_like(start, dtype=torch.bool)
    return model.next_logits(start, positions=torch.zeros_like(start), attention_mask=mask, cache=None)[0].shape[1]


def _check_ends(case: TextEngineCase, request: Request, track: Track) -> None:
    """Every completion ends at its first stop token, COMPLETED, or at the limit, TRUNCATED."""
    text = request.text
    stops, longest = set(text.stop_tokens), text.sampling.max_new_tokens
    for sample, tokens, status in zip(track.sample_ids, track.text.tokens, track.status, strict=True):
        row = tokens.tolist()
        assert 1 <= len(row) <= longest, f"{sample!r}: got {len(row)} tokens, expected 1 to {longest}"
        early = [place for place, token in enumerate(row[:-1]) if token in stops]
        assert not early, f"{sample!r} goes on after a stop token at place {early[0]} of {len(row)}"
        is_stopped = row[-1] in stops
        assert is_stopped or len(row) == longest, (
            f"{sample!r} ends after {len(row)} of {longest} tokens without a stop token: was the last one dropped?"
        )
        expected = Status.COMPLETED if is_stopped else Status.TRUNCATED
        assert status is expected, f"{sample!r} is {status.name}, its last token says {expected.name}"
