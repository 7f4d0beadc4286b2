"""The one sequence of a sample that text and images are generated from, as tokens and as what its images show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Turn
from unirl.model_host.unified.sequence import Block

__all__ = ["Context", "Marks", "layout"]


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Ids of the tokens that structure a sequence."""

    start: int
    """Before a text."""
    end: int
    """After it: the stop token."""
    image_start: int
    image_end: int
    latent: int
    """Stands for a VAE latent; no token of the vocabulary."""
    feature: int
    """Stands for a ViT feature; no token of the vocabulary."""


@dataclass
class Context:
    """A sequence that grows. sizes: gives the latent and the feature tokens of an image."""

    marks: Marks
    tokenize: Callable[[str], list[int]]
    sizes: Callable[[MediaRef], tuple[int, int]]
    tokens: list[int] = field(default_factory=lambda: list[int]())
    blocks: list[Block] = field(default_factory=lambda: list[Block]())

    def add_text(self, text: str) -> None:
        """A text between its marks; nothing for an empty one."""
        if text:
            self.tokens += [self.marks.start, *self.tokenize(text), self.marks.end]

    def add_image(self, ref: MediaRef, *, with_latents: bool) -> None:
        """Its VAE latents, unless left out, then its ViT features."""
        marks, (latents, features) = self.marks, self.sizes(ref)
        kinds = (("latent", marks.latent, latents), ("feature", marks.feature, features))
        for kind, token, count in kinds if with_latents else kinds[1:]:
            self.tokens += [marks.image_start, *[token] * count, marks.image_end]
            self.blocks.append(Block(ref=ref, kind=kind))

    def add_turns(self, turns: Sequence[Turn], *, with_latents: bool) -> None:
        """The model's own texts as they were sampled, with the end that a cut one lacks; those of others, and images,
        as in a prompt."""
        for turn in turns:
            if turn.tokens:
                is_cut = turn.tokens[-1] != self.marks.end
                self.tokens += [self.marks.start, *turn.tokens, *([self.marks.end] if is_cut else [])]
            else:
                self.add_text(turn.text)
            for ref in turn.media:
                self.add_image(ref, with_latents=with_latents)


def layout(tokens: Tensor, keep: Tensor, *, marks: Marks) -> tuple[Tensor, Tensor]:
    """Positions [B, L] and numbers of images [B, L], 0 for text, of sequences with padding anywhere.

    tokens: [B, L].  keep: [B, L] bool, False at padding.
    Each token of text has the next position; an image, the two marks around it included, has one for all its tokens.
    """
    is_image = tokens >= min(marks.latent, marks.feature)
    before, after = torch.zeros_like(is_image), torch.zeros_like(is_image)
    before[:, 1:], after[:, :-1] = is_image[:, :-1], is_image[:, 1:]
    is_start = after & ~is_image
    is_inside = is_image | is_start | before
    numbers = is_start.long().cumsum(dim=1) * is_inside
    moves = keep & (is_start | ~is_inside)
    return (moves.long().cumsum(dim=1) - 1).clamp(min=0), numbers
