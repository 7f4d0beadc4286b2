"""A critic of some thousand weights beside the small decoder, so that algorithms with one can be tried."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from unirl.core.roles import TokenBatch
from unirl.core.types.track import Status, Track
from unirl.numerics.tokens.replay import replay_values

from .text_model import WIDTH, TextWorkbenchModel
from .updates import PlainUpdater

__all__ = ["PlainCritic"]


class PlainCritic(PlainUpdater):
    """Gradient descent on a decoder of its own with one output. Fits `unirl.numerics.train.updater.CriticUpdater`.

    Its values of rows that fill a batch up are no numbers, so that whatever reads them shows.
    """

    is_alone = False

    def __init__(
        self, model: TextWorkbenchModel, *, is_fresh: bool = False, lr: float = 0.0, length: float | None = None
    ) -> None:
        """model: lays texts out.  is_fresh: every value is 0 at first; else they differ.  lr, length: of its steps."""
        own = TextWorkbenchModel(seed=1, device=model.device)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(2)
            head = nn.Linear(WIDTH, 1)
        if is_fresh:
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)
        self.net = nn.ModuleDict({"trunk": own.net, "head": head.to(model.device)})
        self._model, self.packing = model, True
        super().__init__(self.net, lr=lr, length=length)

    def values(self, track: Track) -> Tensor:
        def critic(batch: TokenBatch) -> Tensor:
            return self.net["head"](self._model.hidden(batch, trunk=self.net["trunk"])).squeeze(1)

        result = replay_values(critic, self._model, track, packing=self.packing)
        fills = torch.tensor([status is Status.PADDING for status in track.status], device=result.device)
        return result.masked_fill(fills[:, None], torch.nan)
