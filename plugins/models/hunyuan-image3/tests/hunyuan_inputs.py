"""Inputs of tests."""

from __future__ import annotations

from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs, Turn


def given(
    texts: tuple[str, ...],
    media: tuple[tuple[MediaRef, ...], ...] | None = None,
    turns: tuple[tuple[Turn, ...], ...] | None = None,
) -> Inputs:
    """Inputs with an id each."""
    ids = tuple(map(str, range(len(texts))))
    return Inputs(ids=ids, prompts=texts, texts=texts, media=media or ((),) * len(texts), turns=turns)
