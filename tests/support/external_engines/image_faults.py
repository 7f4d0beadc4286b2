"""Servers of text engines that can be made to read other images than they were sent. Run in the engines' environments.

The host is to see it in what the engine's worker says it read, not in the log-probs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any
from unittest.mock import patch

from external_engines.faults import Switch

__all__ = ["FAULTS", "sglang_llm", "vllm"]


def vllm() -> Mapping[str, Any]:
    return _with_faults("unirl.engines.vllm.server")


def sglang_llm() -> Mapping[str, Any]:
    return _with_faults("unirl.engines.sglang_llm.server")


def _with_faults(server: str) -> Mapping[str, Any]:
    """The calls of this module, and `fault`, which switches one on by its name; "" is none."""
    switch = Switch(FAULTS)

    def fault(asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        switch.turn(asked["name"])
        return None, {}

    return {**import_module(server).calls(), "fault": fault}


@contextlib.contextmanager
def _changed(change: Callable[[list[Any]], list[Any]]) -> Iterator[None]:
    """Rows with other media before the engine gets them."""
    from unirl.engine_host import received

    real = received.rows
    with patch.object(received, "rows", lambda *sent: change(real(*sent))):
        yield


def swaps_images() -> Any:
    """Each row reads the images of the one at the other end."""
    return _changed(
        lambda rows: [
            row._replace(key=other.key, media=other.media) for row, other in zip(rows, rows[::-1], strict=True)
        ]
    )


def shows_images_of_others() -> Any:
    """Each row reads the images of the one at the other end, under its own key."""
    return _changed(lambda rows: [row._replace(media=other.media) for row, other in zip(rows, rows[::-1], strict=True)])


def drops_images() -> Any:
    """The placeholders of images are read as any tokens."""
    return _changed(lambda rows: [row._replace(key="", media={}) for row in rows])


FAULTS: Mapping[str, Callable[[], Any]] = {
    function.__name__: function for function in (swaps_images, shows_images_of_others, drops_images)
}
