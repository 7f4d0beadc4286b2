"""Ways to change what an object does, without a class for each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from unirl.core.errors import RecipeError
from unirl.core.types.track import Track

Change = Callable[..., Any]
"""Replaces a method: called with the object, its own method, and the arguments of the call."""


def changed(whole: Any, changes: Mapping[str, Change]) -> Any:
    """The same object with changed methods, which its own calls of them see too."""
    for name, change in changes.items():
        setattr(whole, name, partial(change, whole, getattr(whole, name)))
    return whole


class Proxy:
    """Passes everything on to another object, so that changes to it are seen from outside alone."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "inner" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def takes(change: Callable[[Any], Any]) -> Change:
    """The method with its first argument changed."""
    return lambda _, method, first, *args, **kwargs: method(change(first), *args, **kwargs)


def returns(change: Callable[[Any], Any]) -> Change:
    """The method with its result changed."""
    return lambda _, method, *args, **kwargs: change(method(*args, **kwargs))


def first(action: Callable[..., object]) -> Change:
    """An action with the object and the arguments of a call, then the method."""

    def change(whole: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        action(whole, *args, **kwargs)
        return method(*args, **kwargs)

    return change


def then(action: Callable[..., object]) -> Change:
    """The method, then an action with the object and the arguments of the call."""

    def change(whole: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        action(whole, *args, **kwargs)
        return result

    return change


def if_refused(instead: Callable[..., Any]) -> Change:
    """The method, and where it raises a RecipeError `instead`, which gets the same arguments."""

    def change(whole: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except RecipeError:
            return instead(whole, method, *args, **kwargs)

    return change


def closes_once(whole: Any, close: Callable[[], None]) -> None:
    if "is_closed" in vars(whole):
        raise RuntimeError("it is closed already")
    close()
    whole.is_closed = True


def leaves_thread(*, seconds: float) -> Change:
    """The method leaves a thread running, which ends long after a claim has looked: the tests have to end."""

    def start(*_: Any) -> None:
        threading.Thread(target=threading.Event().wait, args=(seconds,), daemon=True).start()

    return then(start)


def skipped(*_: Any, **__: Any) -> None:
    """The method does nothing."""


def with_segment(track: Track, **fields: Any) -> Track:
    """The track with these fields of its segment."""
    return replace(track, segment=replace(track.segment, **fields))


def with_log_probs_moved(track: Track, by: float) -> Track:
    """The track with this added to all log-probs of its samples."""
    log_probs: Any = track.segment.log_probs  # type: ignore[union-attr]
    moved = tuple(row + by for row in log_probs) if isinstance(log_probs, tuple) else log_probs + by
    return with_segment(track, log_probs=moved)


def loss_with(forward: Mapping[str, Change]) -> dict[str, Change]:
    """A loss that gets a changed `Forward`."""
    return {
        "loss": lambda _, loss, track, replay, *, progress: loss(
            track, changed(Proxy(replay), forward), progress=progress
        )
    }
