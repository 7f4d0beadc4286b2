"""Tests for every text engine: an engine's test module imports all of them.

Its conftest has the fixtures `ask`, `folder` and `model` of `texts`, and a fixture `engine`, which keeps the weights of
the previous test, with room for adapters, and with so few tokens per step that two long prompts do not fit together.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from unirl.conformance.doubles.requests import params_of_another_kind
from unirl.conformance.doubles.weight_updates import full_update, lora_update, perturb, with_adapter
from unirl.core.errors import RecipeError, RunFailed
from unirl.core.roles import TextModel
from unirl.core.types.rollout import verify_echo
from unirl.core.types.track import Status
from unirl.engine_host.text_engine import ExternalTextEngine

from .listening import Listening
from .processes import kill_soon, mark_of, processes_of, stop
from .texts import ROUNDING, Ask, assert_greedy, gap
from .updates import check_unfit_updates


@pytest.mark.usefixtures("engine")
def test_it_listens_on_loopback_alone_from_its_first_moment(listening: Listening) -> None:
    """All ranks are on one host. `listening` was recorded while the engine started."""
    assert listening.addresses, "nothing was seen"
    assert not listening.beyond_loopback()


def test_log_probs_are_those_of_the_weights_at_the_sampling_temperature(
    engine: ExternalTextEngine, model: TextModel, ask: Ask
) -> None:
    engine.load_weights(full_update(model, version=1))
    for temperature in (1.0, 0.7):
        request = ask(engine, temperature=temperature)
        track = engine.generate(request)
        verify_echo(request, track)
        assert gap(track, model) < ROUNDING


def test_greedy_texts_are_those_of_the_trainer(engine: ExternalTextEngine, model: TextModel, ask: Ask) -> None:
    engine.load_weights(full_update(model, version=1))
    assert_greedy(engine, model, ask)


def test_a_text_depends_on_its_seed_and_not_on_what_else_is_generated(
    engine: ExternalTextEngine, model: TextModel, ask: Ask
) -> None:
    engine.load_weights(full_update(model, version=1))
    request = ask(engine)
    whole = engine.generate(request).text.tokens
    alone = engine.generate(request.select([4, 1])).text.tokens
    others = engine.generate(ask(engine, seed=1)).text.tokens
    assert [row.tolist() for row in alone] == [whole[4].tolist(), whole[1].tolist()]
    # 16 tokens of a nearly flat distribution over 261: two samples of one prompt never agree.
    assert all(one.tolist() != other.tolist() for one, other in zip(whole, others, strict=True))
    assert whole[0].tolist() != whole[1].tolist()


def test_prompts_that_do_not_fit_in_one_step_do_not_change_what_is_drawn(
    engine: ExternalTextEngine, model: TextModel, ask: Ask
) -> None:
    """300 tokens each with 512 per step: a chunked prompt must not sample twice."""
    engine.load_weights(full_update(model, version=1))
    request = ask(engine, chat=False)
    long = tuple(torch.cat([row.repeat(300), row])[-300:] for row in request.text.prompt_tokens)
    text = dataclasses.replace(request.text, prompt_tokens=long)
    request = dataclasses.replace(request, params=text)
    whole = engine.generate(request).text.tokens
    for row in range(request.num_rows):
        (alone,) = engine.generate(request.select([row])).text.tokens
        assert alone.tolist() == whole[row].tolist()


def test_a_text_ends_at_a_stop_token_a_stop_string_or_the_limit(
    engine: ExternalTextEngine, model: TextModel, ask: Ask
) -> None:
    engine.load_weights(full_update(model, version=1))
    free = engine.generate(ask(engine, temperature=0.0, stop_tokens=()))
    assert free.status == (Status.TRUNCATED,) * 6
    assert free.text.lengths == (16,) * 6

    token = int(free.text.tokens[0][5])
    stopped = engine.generate(ask(engine, temperature=0.0, stop_tokens=(token,)))
    first = free.text.tokens[0].tolist().index(token)
    assert stopped.text.tokens[0].tolist() == free.text.tokens[0].tolist()[: first + 1]
    assert stopped.status[0] is Status.COMPLETED

    # A token is a byte here, so letters and tokens have the same positions. Completions are the same up to it.
    drawn = engine.generate(ask(engine, stop_tokens=())).text.tokens
    letter, rows = most_common_letter(model, drawn)
    result = engine.generate(ask(engine, stop_tokens=(), stop=[letter]))
    assert any(row is not None for row in rows) and result.media is not None
    for row, place in enumerate(rows):
        assert result.text.tokens[row].tolist() == drawn[row].tolist()[: 16 if place is None else place + 1]
        assert result.status[row] is (Status.TRUNCATED if place is None else Status.COMPLETED)
        assert letter not in result.media.texts[row]


def test_after_a_full_sync_it_samples_from_what_was_sent(
    engine: ExternalTextEngine, model: TextModel, ask: Ask
) -> None:
    """And from nothing older: tied and fused layers, and cached keys and values of prompts, are updated too."""
    engine.load_weights(full_update(model, version=1))
    request = ask(engine)
    engine.generate(request)
    perturb(model, seed=1)
    stale = engine.generate(request)
    assert gap(stale, model) > 1e-1, "the check does not see weights of an older version"

    update = full_update(model, version=7)
    receipt = engine.load_weights(update)
    track = engine.generate(dataclasses.replace(request, policy_version=7))
    assert (receipt.version, receipt.checksum, engine.version) == (7, update.checksum, 7)
    assert receipt.size_bytes == 4 * sum(value.numel() for value in update.tensors.values())
    assert track.policy_version == (7,) * 6
    assert gap(track, model) < ROUNDING
    assert_greedy(engine, model, ask)


def test_an_adapter_is_sampled_from_and_gone_with_the_next_full_sync(
    engine: ExternalTextEngine, model: TextModel, ask: Ask
) -> None:
    """Compared with a model with merged weights, W + scale B A."""
    engine.load_weights(full_update(model, version=1))
    for version in (2, 3):
        update, added = lora_update(model, model.spec, version=version, seed=version, scale=1.3)
        engine.load_weights(update)
        folded = with_adapter(copy.deepcopy(model), added)
        assert gap(engine.generate(ask(engine)), folded) < ROUNDING
        assert_greedy(engine, folded, ask)
    perturb(model, seed=2)
    engine.load_weights(full_update(model, version=4))
    assert gap(engine.generate(ask(engine)), model) < ROUNDING


def test_updates_that_do_not_fit_are_refused_and_change_nothing(
    engine: ExternalTextEngine, model: TextModel, ask: Ask
) -> None:
    request = ask(engine)

    def sampled() -> list[list[int]]:
        return [row.tolist() for row in engine.generate(request).text.tokens]

    check_unfit_updates(engine, model, sampled)


def test_requests_that_it_cannot_honour_are_refused(engine: ExternalTextEngine, ask: Ask) -> None:
    request = ask(engine)
    with pytest.raises(RecipeError, match=r"takes 512 \(engine.max_model_len\)"):
        engine.generate(ask(engine, max_new_tokens=512))
    with pytest.raises(RecipeError, match="another"):
        engine.generate(dataclasses.replace(request, track="another", params=params_of_another_kind(request)))
    engine.sleep()
    with pytest.raises(RunFailed, match="asleep"):
        engine.generate(request)
    engine.wake()
    engine.generate(request)


def check_deaths(engine: ExternalTextEngine, model: TextModel, ask: Ask) -> None:
    """Killed during a sync, and during a rollout after the restart, the engine reports it and recovers. Ends with the
    engine closed."""
    engine.load_weights(full_update(model, version=1))
    process: Any = engine._process
    stop(process.pid)
    kill_soon(process.pid)
    with pytest.raises(RunFailed, match=r"died in 'load_weights' \(killed by SIGKILL\)"):
        engine.load_weights(full_update(model, version=2))
    assert engine.version == 1
    with pytest.raises(RunFailed, match="the sync of version 2 did not complete"):
        engine.generate(ask(engine))

    perturb(model, seed=3)
    engine.load_weights(full_update(model, version=3))
    assert gap(engine.generate(ask(engine)), model) < ROUNDING

    mark = mark_of(process)
    kill_soon(process.pid)
    began = time.monotonic()
    with pytest.raises(RunFailed, match=r"died in 'generate' \(killed by SIGKILL\)"):
        while True:
            engine.generate(ask(engine, max_new_tokens=400, stop_tokens=()))
    # Killed after 0.5 s; the guard polls every 0.1 s. The rest is the machine's load.
    assert time.monotonic() - began < 10
    engine.close()
    engine.close()
    with pytest.raises(RunFailed, match="it is closed"):
        engine.load_weights(full_update(model, version=4))
    assert not processes_of(mark)


def most_common_letter(model: TextModel, rows: Sequence[Tensor]) -> tuple[str, list[int | None]]:
    """The ASCII letter that most rows have, and its first place in each."""
    written = [model.texts([row[place : place + 1] for place in range(len(row))]) for row in rows]
    letters = {letter for row in written for letter in row if letter.isascii() and letter.isalnum()}
    letter = max(sorted(letters), key=lambda letter: sum(letter in row for row in written))
    return letter, [row.index(letter) if letter in row else None for row in written]
