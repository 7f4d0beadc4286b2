"""The kit's small algorithm over tokens with a critic beside it, and the critic's training by torch alone."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from unirl.core.roles import Losses, LossTerm, Metric
from unirl.core.types.track import Track
from unirl.numerics.tokens.batches import pad_batch
from unirl.numerics.tokens.replay import per_token

from .text_model import PAD, WIDTH, TextWorkbenchModel
from .text_surrogate import TextSurrogate

__all__ = ["Judged", "critic_values"]


class Judged(TextSurrogate):
    """An algorithm with a critic: the policy follows the track's advantages, the critic the rewards."""

    trains_critic = True

    def after_anchor(
        self, track: Track, sum_over_ranks: Callable[[Tensor], Tensor]
    ) -> tuple[Track, Mapping[str, Metric]]:
        assert track.rewards is not None and track.text.values is not None, "after_anchor() comes after the values"
        returns = tuple(reward.expand(n).clone() for reward, n in zip(track.rewards, track.text.lengths, strict=True))
        return dataclasses.replace(track, segment=dataclasses.replace(track.text, returns=returns)), {}

    def critic_weights(self, track: Track) -> dict[str, Tensor]:
        return {"value": self.loss_weights(track)["policy"]}

    def critic_loss(self, track: Track, values: Tensor, *, progress: float) -> Losses:
        errors = (values - per_token(track.text, "returns")).square()
        return Losses(terms=[LossTerm(name="value", values=errors, weights=self.critic_weights(track)["value"])])


def critic_values(tracks: Sequence[Track], of: Track, **adamw: Any) -> list[Tensor]:
    """[L] of each row of `of`: what a copy of the model with one output that starts at 0 expects after an update on
    each track, by autograd and torch's AdamW, a text at a time."""
    model = TextWorkbenchModel()
    trunk, head = copy.deepcopy(model.net).eval(), nn.Linear(WIDTH, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    adam = torch.optim.AdamW([*trunk.parameters(), *head.parameters()], **adamw)

    def values(track: Track, row: int) -> Tensor:
        batch = pad_batch([track.text.prompt_tokens[row]], [track.text.tokens[row]], pad_token=PAD)
        return head(model.hidden(batch, trunk=trunk)).squeeze(1)

    for track in tracks:
        assert track.rewards is not None
        total = sum(track.text.lengths)
        for row in range(track.num_rows):
            ((values(track, row) - track.rewards[row]).square().sum() / total).backward()
        adam.step()
        adam.zero_grad()
    with torch.no_grad():
        return [values(of, row) for row in range(of.num_rows)]
