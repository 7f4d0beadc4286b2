"""A model of text between words and tokens: prompts, chat templates, texts, what ends them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from unirl.conformance.claims import claim
from unirl.conformance.doubles.requests import PROMPTS
from unirl.conformance.fixtures.text_model import TextModelCase
from unirl.conformance.verdicts import NotApplicable
from unirl.core.errors import UniRLError
from unirl.core.roles import TextModel
from unirl.core.specs.capability import Cap

SYSTEM = "be brief"
TEXTS = (*PROMPTS, " two  spaces ", "one\nline and another", "1 + 2 = 3?", "\u00e4 \u6f22 \U0001f600")
"""Spaces, lines, digits and letters of one to four bytes."""


@claim("model", track="text")
def test_prompt_tokens_are_those_of_the_prompt_alone(case: TextModelCase) -> None:
    """Each prompt gets a row [P] of int64 on the CPU, P at least 1: the same again, alone and beside others, in their
    order; other prompts get other tokens. Requests are planned before anything runs, and on every rank alike.

    If it fails: tokenize without padding and truncation, keep nothing from call to call, and look at whether the
    tokenizer was loaded with its vocabulary.
    """
    prompts = (*PROMPTS, f"{PROMPTS[-1]}s")
    with case.model() as model:
        together = case.prompts(model, prompts)
        order = range(len(prompts))
        again = case.prompts(model, prompts[::-1], numbers=order[::-1])[::-1]
        alone = [case.prompts(model, [prompts[number]], numbers=[number])[0] for number in order]
    assert len(together) == len(prompts), f"{len(prompts)} prompts got {len(together)} rows of tokens"
    for number, (prompt, tokens) in enumerate(zip(prompts, together, strict=True)):
        assert tokens.ndim == 1 and tokens.dtype == torch.int64 and tokens.device.type == "cpu", (
            f"{prompt!r} is {tokens.dtype} {list(tokens.shape)} on {tokens.device}; [P] int64 on the CPU is promised"
        )
        assert len(tokens), f"{prompt!r} has no token to go on from"
        for how, others in (("in another order", again), ("alone", alone)):
            assert torch.equal(others[number], tokens), f"{prompt!r} has other tokens {how}"
        same = [other for other in range(number) if torch.equal(together[other], tokens)]
        assert not same, f"{prompt!r} and {prompts[same[0]]!r} have the same tokens"


@claim("model", track="text")
def test_chat_settings_change_the_prompt(case: TextModelCase) -> None:
    """Without `chat` a prompt is unchanged. With it the template is put around it: the prompt is still in it, a
    system prompt is added where one is given, and the switch `thinking` changes the tokens; or the setting is rejected
    by name. Nothing is ever left out without a word.

    If it fails: hand `system_prompt` and `thinking` to the template, and refuse what it has no place for.
    """
    with case.model() as model:
        plain = _tokens(case, model, PROMPTS, chat=False)
        chat = _tokens(case, model, PROMPTS, chat=True)
        if chat is not None:
            _check_template(case, model, chat)
        assert plain is not None or chat is not None, "prompts are refused with `chat` and without it"
        for prompt, row in zip(PROMPTS, plain or (), strict=bool(plain)):
            assert model.texts([row]) == [prompt], f"without `chat`, {prompt!r} reads {model.texts([row])}"


@claim("model", track="text")
def test_decoding_inverts_tokenizing(case: TextModelCase) -> None:
    """Tokens become exactly the text that they were made of, spaces and letters of any script included, each row its
    own; what ends a text, or fills rows up, is not in it, and no tokens give an empty text.

    If it fails: decode with `skip_special_tokens=True` and without cleaning up spaces; keep the rows in their order.
    """
    with case.model() as model:
        rows = _tokens(case, model, TEXTS, chat=False)
        if rows is None:
            raise NotApplicable(f"model {case.spec.name!r} takes no prompt without its chat template")
        result = model.texts(rows)
        assert list(result) == list(TEXTS), f"{list(TEXTS)} became {list(result)}"
        special = torch.tensor([*model.stop_tokens, model.pad_token])
        marked = model.texts([torch.cat([row, special]) for row in rows])
        assert list(marked) == list(TEXTS), f"tokens that are no text are seen in {list(marked)}"
        assert list(model.texts([special[:0]])) == [""], "no tokens became a text"


@claim("model", proves=Cap.OBSERVATIONS, track="text")
def test_an_observation_is_the_next_message(case: TextModelCase) -> None:
    """The tokens of an observation have its text in them, and nothing else without the chat template. With it they end
    the completion before them, once: where its last token is its end, they begin behind that.

    If it fails: tokenize what the chat template writes behind a message of the assistant, and leave its end out where
    the completion has one.
    """
    said = "seven green bottles"
    with case.model() as model:
        completion = case.prompts(model, ["a completion"], chat=False)[0]
        for chat in (True, False):
            (row,) = _observed(case, model, said, [completion], chat=chat)
            assert row.ndim == 1 and row.dtype == torch.int64 and row.device.type == "cpu", (
                f"got {row.dtype} {list(row.shape)} on {row.device}, expected [L] int64 on the CPU"
            )
            (text,) = model.texts([row])
            assert said in text if chat else said == text, f"{said!r} reads {text!r} with chat={chat}"
        whole, *ended = (
            torch.cat([before, *_observed(case, model, said, [before], chat=True)])
            for before in (completion, *(torch.cat([completion, torch.tensor([end])]) for end in model.stop_tokens))
        )
        assert any(torch.equal(whole, one) for one in ended), (
            "a completion with its end is followed by other tokens than one whose end the template adds"
        )


@claim("model", track="text")
def test_stop_tokens_and_padding_are_tokens_of_the_model(case: TextModelCase) -> None:
    """The model names what ends its texts, tokens that it can generate, and a token that fills rows up.

    Without one that ends it, every text runs into its limit and counts as truncated.

    If it fails: read `eos_token_id` from generation_config.json, then config.json, then the tokenizer; a tokenizer may
    have more tokens than the output projection.
    """
    with case.model() as model:
        vocabulary = case.next_logits(model, case.prompts(model)[:1], [0]).shape[1]
        stops, pad = tuple(model.stop_tokens), model.pad_token
    case.record("tokens that it can generate", vocabulary)
    assert stops, "`stop_tokens` is empty"
    assert len(set(stops)) == len(stops), f"`stop_tokens` names one twice: {stops}"
    strange = [token for token in (*stops, pad) if not 0 <= token < vocabulary]
    assert not strange, f"tokens {strange} are beyond the {vocabulary} that the model has logits for"


def _observed(case: TextModelCase, model: TextModel, text: str, after: Sequence[Tensor], *, chat: bool) -> list[Tensor]:
    """The tokens of the same observation after each completion."""
    sampling = case.sampling(chat=chat)
    return model.observation_tokens([text] * len(after), after=after, role="user", sampling=sampling)


def _tokens(case: TextModelCase, model: TextModel, prompts: Sequence[str], **settings: Any) -> list[Tensor] | None:
    """The tokens, or None where the model rejects the settings by name."""
    try:
        return case.prompts(model, prompts, **settings)
    except UniRLError as error:
        assert any(name in str(error) for name in settings), f"{settings} are refused without naming them: {error}"
        return None


def _check_template(case: TextModelCase, model: TextModel, chat: Sequence[Tensor]) -> None:
    for prompt, row in zip(PROMPTS, chat, strict=True):
        reply = model.texts([row])[0]
        assert prompt in reply, f"in the chat template {prompt!r} reads {reply!r}"
    system = _tokens(case, model, PROMPTS, system_prompt=SYSTEM)
    if system is not None:
        reply = model.texts([system[0]])[0]
        assert SYSTEM in reply, f"the system prompt {SYSTEM!r} is not in {reply!r}"
        assert PROMPTS[0] in reply, f"with a system prompt, {PROMPTS[0]!r} is not in {reply!r}"
    on, off = (_tokens(case, model, PROMPTS, thinking=switch) for switch in (True, False))
    if on is not None and off is not None:
        same = all(torch.equal(one, other) for one, other in zip(on, off, strict=True))
        assert not same, "`thinking` true and false give the same tokens, so the switch is lost"
