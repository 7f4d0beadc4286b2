"""The one sequence of a sample that text and images are generated from, as tokens and as what its images show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Turn
from unirl.model_host.unified.sequence import Block

from .module import Stand

__all__ = ["NAMES", "Context", "Marks", "layout", "moves"]

NAMES = {
    "image": "<boi>",
    "image_end": "<eoi>",
    "separator": "<joint_img_sep>",
    "cfg": "<cfg>",
    "think": "<think>",
    "think_end": "</think>",
    "recaption": "<recaption>",
    "recaption_end": "</recaption>",
    "answer": "<answer>",
    "answer_end": "</answer>",
}
"""Fields of `Marks` -> tokens."""


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Ids of the tokens that structure a sequence."""

    start: int
    end: int
    image: int
    image_end: int
    separator: int
    """Between an image's latents and its features."""
    cfg: int
    """Stands for a text that is left out."""
    think: int
    think_end: int
    recaption: int
    recaption_end: int
    answer: int
    answer_end: int
    size: int
    """That images have about the area of the base size."""
    ratios: tuple[int, ...]

    def closing(self, tokens: Sequence[int]) -> list[int]:
        """The end of the tag that is open after a text which was cut off."""
        ends = {self.think: self.think_end, self.recaption: self.recaption_end}
        tags = [token for token in tokens if token in {*ends, *ends.values()}]
        return [ends[tags[-1]]] if tags and tags[-1] in ends else []


@dataclass
class Context:
    """A sequence that grows. sizes: gives the number of the ratio, the latents and the features of an image."""

    marks: Marks
    stand: Stand
    tokenize: Callable[[str], list[int]]
    sizes: Callable[[MediaRef], tuple[int, int, int]]
    has_roles: bool
    """Whether texts are those of a user and an assistant."""
    begin: list[int]
    """Tokens before the model's first text."""
    tokens: list[int] = field(default_factory=lambda: list[int]())
    blocks: list[Block] = field(default_factory=lambda: list[Block]())
    _role: str = ""

    def add_system(self, text: str) -> None:
        if text:
            self.tokens += self.tokenize(text)
            self._separate()

    def turn_to(self, role: str) -> None:
        """Begin the words of `User` or `Assistant`, unless they speak already. Pieces are tokenised one by one."""
        if self.has_roles and role != self._role:
            if self._role:
                self._separate()
            self.tokens += self.tokenize(f"{role}: ")
            self._role = role

    def add_size(self, ratio: int) -> None:
        self.tokens += [self.marks.image, self.marks.size, self.marks.ratios[ratio]]

    def add_image(self, ref: MediaRef) -> None:
        """Its VAE latents, then its ViT features."""
        ratio, latents, features = self.sizes(ref)
        stand, marks = self.stand, self.marks
        self.add_size(ratio)
        self.tokens += [stand.clean_time, *[stand.latent] * latents, marks.separator]
        self.tokens += [*[stand.feature] * features, marks.image_end]
        self.blocks += [Block(ref=ref, kind="latent"), Block(ref=ref, kind="feature")]

    def add_turns(self, turns: Sequence[Turn]) -> None:
        """The model's own texts as they were sampled, with the end of a tag that a cut one lacks, and its images as
        answers; texts of others as the user's."""
        marks = self.marks
        for turn in turns:
            if turn.tokens:
                self.turn_to("Assistant")
                own, self.begin = [*self.begin, *turn.tokens], []
                self.tokens += [*own, *marks.closing(own)]
            elif turn.text:
                self.turn_to("User")
                self.tokens += self.tokenize(turn.text)
            for ref in turn.media:
                self.turn_to("Assistant")
                self.tokens += [marks.answer] if self.has_roles else []
                self.add_image(ref)
                self.tokens += [marks.answer_end] if self.has_roles else []
        self.turn_to("Assistant")

    def _separate(self) -> None:
        if self.has_roles:
            self.tokens += self.tokenize("\n\n")


def layout(tokens: Tensor, keep: Tensor, *, marks: Marks, stand: Stand) -> tuple[Tensor, Tensor]:
    """Positions [B, L], from 0 at the first token that is none of padding, and numbers of images [B, L], 0 for text.

    tokens: [B, L].  keep: [B, L] bool, False at padding.
    The latents and the features of an image, with the token between them, are one.
    """
    is_image = (tokens >= stand.latent) & (tokens <= stand.noisy)
    before, after = torch.zeros_like(is_image), torch.zeros_like(is_image)
    before[:, 1:], after[:, :-1] = is_image[:, :-1], is_image[:, 1:]
    is_inside = is_image | ((tokens == marks.separator) & before & after)
    starts = is_inside.clone()
    starts[:, 1:] &= ~is_inside[:, :-1]
    return (keep.long().cumsum(dim=1) - 1).clamp(min=0), starts.long().cumsum(dim=1) * is_inside


def moves(height: int, width: int, count: int) -> Tensor:
    """[count, 2] int64: what row and column of each token of an image add to its position.

    Row by row, a grid is centred in the positions that its tokens take; halves are cut off. Tokens behind the grid, ViT
    features of padding, stay where they are.
    """
    rows, columns = torch.arange(height)[:, None], torch.arange(width)[None]
    area = height * width
    first, second = torch.broadcast_tensors((area - height) // 2 + rows, (area - width) // 2 + columns)
    result = torch.zeros(count, 2, dtype=torch.int64)
    result[:area] = torch.stack([first.flatten(), second.flatten()], dim=1) - torch.arange(area)[:, None]
    return result
