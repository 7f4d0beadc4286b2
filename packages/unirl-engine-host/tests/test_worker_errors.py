"""Errors of an engine's workers, which are returned and raised again on the server."""

from __future__ import annotations

import pytest
from unirl.engine_host.frames import Unchanged, answers_errors, raise_errors


@answers_errors
def load(outcome: Exception | None) -> None:
    if outcome is not None:
        raise outcome


def test_a_call_that_works_answers_nothing_and_raises_nothing() -> None:
    raise_errors("load", [load(None), load(None)])


def test_what_every_worker_refuses_is_unchanged() -> None:
    with pytest.raises(Unchanged, match="load: the checksum differs"):
        raise_errors("load", [load(Unchanged("the checksum differs"))] * 2)


@pytest.mark.parametrize("first", [None, Unchanged("too late")])
def test_what_one_worker_fails_at_is_torn_whatever_the_others_say(
    first: Exception | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError, match="ValueError: the weight held differs"):
        raise_errors("load", [load(first), load(ValueError("the weight held differs"))])
    assert "Traceback" in capsys.readouterr().err


def test_what_one_worker_refuses_and_another_took_is_torn() -> None:
    with pytest.raises(RuntimeError, match="the checksum differs"):
        raise_errors("load", [load(Unchanged("the checksum differs")), load(None)])
