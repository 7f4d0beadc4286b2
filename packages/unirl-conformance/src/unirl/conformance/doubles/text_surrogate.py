"""The kit's small algorithm once more, over tokens, and the training that it stands for by torch alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from unirl.core.roles import Algorithm, Forward, Losses, LossTerm
from unirl.core.types.track import Track
from unirl.numerics.tokens.batches import pad_batch

from .plain_training import with_adapters
from .surrogate import clipped
from .text_model import PAD, TextWorkbenchModel
from .track_numbers import log_probs_of, with_log_probs

__all__ = ["TextSurrogate", "trained_plainly"]


class TextSurrogate(Algorithm):
    """A `unirl.core.roles.Algorithm`: PPO's clipped loss of every token, all of them alike."""

    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        """The rewards themselves."""
        return dataclasses.replace(track, advantages=track.rewards), {}

    def with_old_log_probs(self, track: Track, forward: Forward) -> Track:
        return with_log_probs(track, forward(track).log_probs.detach())

    def loss_weights(self, track: Track) -> dict[str, Tensor]:
        lengths = torch.tensor(track.text.lengths, device=track.sample_weights.device)
        valid = torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]
        return {"policy": track.sample_weights[:, None] * valid}

    def loss(self, track: Track, forward: Forward, *, progress: float) -> Losses:
        old = log_probs_of(track)
        assert track.advantages is not None and old is not None
        values = clipped(forward(track).log_probs - old, track.advantages)
        return Losses(terms=[LossTerm(name="policy", values=values, weights=self.loss_weights(track)["policy"])])


def trained_plainly(
    weights: Mapping[str, Tensor],
    tracks: Sequence[Track],
    *,
    base: Mapping[str, Tensor] | None = None,
    scale: float = 1.0,
    **adamw: Any,
) -> dict[str, Tensor]:
    """The weights after an update on each track, by autograd and torch's AdamW on the plain module, a text at a time.

    base: whole weights that adapters are laid over, times `scale`.
    """
    live = {name: value.detach().clone().requires_grad_() for name, value in weights.items()}
    adam = torch.optim.AdamW(live.values(), **adamw)
    model = TextWorkbenchModel()

    def log_probs(track: Track, row: int) -> Tensor:
        prompt, tokens = track.text.prompt_tokens[row], track.text.tokens[row]
        batch = pad_batch([prompt], [tokens], pad_token=PAD)
        whole = dict(live) if base is None else with_adapters(base, live, scale=scale)
        result: Any = functional_call(
            model.net, whole, model.layout(batch), {"index": batch.target_index, "cache": None}
        )
        return torch.log_softmax(result[0] / track.text.temperature, dim=1).gather(1, tokens[:, None]).squeeze(1)

    for track in tracks:
        assert track.advantages is not None
        total = sum(track.text.lengths)
        for row in range(track.num_rows):
            new = log_probs(track, row)
            values = clipped((new - new.detach())[None], track.advantages[row : row + 1])
            (values.sum() / total).backward()
        adam.step()
        adam.zero_grad()
    return {name: value.detach() for name, value in live.items()}
