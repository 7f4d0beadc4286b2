"""Replies of vLLM-Omni's workers, and how the server combines them."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
from unirl.engine_host.frames import UNCHANGED, Unchanged
from unirl.engines.vllm_omni.server import _Server


def answered(replies: list[Any]) -> list[Any]:
    """A call to workers that answer it with these."""

    async def collective_rpc(method: str, *, args: tuple[Any, ...]) -> list[Any]:
        return replies

    made = _Server()
    made._omni = SimpleNamespace(collective_rpc=collective_rpc)
    with contextlib.closing(made._loop):
        return made._on_workers("unirl_load_full")


def test_answers_of_all_workers_come_in_their_order() -> None:
    assert answered([["a", "b"], "c"]) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("replies", "raised"),
    [
        ([[{UNCHANGED: "no"}, {UNCHANGED: "no"}]], Unchanged),
        # One worker took what the other refused: layers of two versions.
        ([[{UNCHANGED: "no"}, None]], RuntimeError),
        ([[{UNCHANGED: "no"}, {"error": "the memory is gone"}]], RuntimeError),
        # Words decide nothing.
        ([{"error": "weights of other names were sent, and half of them written"}], RuntimeError),
        ([[None, {"error": "unchanged"}]], RuntimeError),
    ],
)
def test_an_update_is_refused_unchanged_only_where_every_worker_says_so(
    replies: list[Any], raised: type[Exception]
) -> None:
    with pytest.raises(raised) as caught:
        answered(replies)
    assert isinstance(caught.value, Unchanged) == (raised is Unchanged)
