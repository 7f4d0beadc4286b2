"""Inputs of samples, keyed by ids and never by text.

Edit sets repeat an instruction over different images, so equal texts say nothing about equal inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Self

from ..errors import BatchError
from .batch import Batch, rows
from .data import MediaRef, Prompt

__all__ = ["Inputs", "Turn", "distinct"]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What an earlier stage of a sample gave."""

    stage: str
    text: str = ""
    """Its decoded text; "" of a stage of images."""
    tokens: tuple[int, ...] = ()
    """Its tokens as they were sampled, the stop token included; () of a stage of images, or of another model."""
    media: tuple[MediaRef, ...] = ()
    """Its image."""


@dataclass(frozen=True, kw_only=True)
class Inputs(Batch):
    """Inputs of each sample."""

    ids: tuple[str, ...] = rows()
    """Rows of one id have the same text and media, and are encoded once. Rows of different ids never share."""
    prompts: tuple[str, ...] = rows()
    """The user's prompts; rewards score against them."""
    texts: tuple[str, ...] = rows()
    """Texts given to the model."""
    media: tuple[tuple[MediaRef, ...], ...] = rows()
    """Media given to the model besides the text."""
    turns: tuple[tuple[Turn, ...], ...] | None = rows(default=None)
    """What the stages before this one gave, oldest first, for tracks that continue from it (`ModelSpec.continues`); the
    model goes on after text, media and these. None: the track is made from text and media alone."""

    def __post_init__(self) -> None:
        self._check_rows()
        first: dict[str, int] = {}
        for row, name in enumerate(self.ids):
            other = first.setdefault(name, row)
            if (self.texts[row], self.media[row]) != (self.texts[other], self.media[other]):
                raise BatchError(
                    f"Inputs.ids: rows {other} and {row} are both {name!r}, with texts {self.texts[other]!r} and "
                    f"{self.texts[row]!r} and media {self.media[other]} and {self.media[row]}. Give rows of different "
                    "text or media different ids."
                )
            if self.turns is not None and self.turns[row] != self.turns[other]:
                raise BatchError(
                    f"Inputs.ids: rows {other} and {row} are both {name!r} and go on from different turns. Give them "
                    "different ids."
                )

    @property
    def num_rows(self) -> int:
        return len(self.ids)

    @classmethod
    def of_prompts(cls, prompts: Sequence[Prompt]) -> Self:
        """Inputs as prompt files have them: the text is the prompt."""
        texts = tuple(prompt.text for prompt in prompts)
        return cls(
            ids=tuple(prompt.prompt_id for prompt in prompts),
            prompts=texts,
            texts=texts,
            media=tuple(prompt.media for prompt in prompts),
        )

    @classmethod
    def of_texts(cls, texts: Sequence[str]) -> Self:
        """Inputs without media, whose ids are their texts."""
        given = tuple(texts)
        return cls(ids=given, prompts=given, texts=given, media=((),) * len(given))

    def with_roles(self, roles: Collection[str]) -> Self:
        """The inputs with media of these roles alone."""
        return replace(self, media=tuple(tuple(ref for ref in row if ref.role in roles) for row in self.media))

    def negative(self, text: str) -> Self:
        """The inputs of the negative branch of guidance: this text in place of all texts, beside the same images.

        Dropped are the text of each row and the texts and tokens of its turns, an instruction included; kept are its
        media and the images of its turns. Rows without any image are one input, whose id is "", as no prompt's is, and
        are encoded once; the others keep their ids.
        """
        images = self._turns(lambda turn: replace(turn, text="", tokens=()) if turn.media else None)
        given = zip(self.ids, self.media, images or ((),) * self.num_rows, strict=True)
        ids = tuple(name if media or turns else "" for name, media, turns in given)
        return replace(self, ids=ids, texts=(text,) * self.num_rows, turns=images)

    def without_media(self) -> Self:
        """The inputs without media: the text of each row, and the texts of turns that others wrote, an instruction
        included. The model's own texts are dropped with the images, which they may describe."""
        words = self._turns(lambda turn: replace(turn, media=()) if turn.text and not turn.tokens else None)
        return replace(self, media=((),) * self.num_rows, turns=words)

    def _turns(self, kept: Callable[[Turn], Turn | None]) -> tuple[tuple[Turn, ...], ...] | None:
        """What is kept of the turns; None if nothing is."""
        rows = tuple(tuple(own for turn in row if (own := kept(turn))) for row in self.turns or ())
        return rows if any(rows) else None


def distinct(inputs: Inputs) -> tuple[list[int], list[int]]:
    """The first row of each id, in order, and for each row which of those it is: row n is like `rows[index[n]]`."""
    numbers: dict[str, int] = {}
    first: list[int] = []
    for row, name in enumerate(inputs.ids):
        if name not in numbers:
            numbers[name] = len(first)
            first.append(row)
    return first, [numbers[name] for name in inputs.ids]
