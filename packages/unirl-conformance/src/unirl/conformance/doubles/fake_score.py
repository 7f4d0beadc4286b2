"""A fake score beside the small denoiser, so that algorithms with one can be tried."""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager

import torch

from .plain_updater import PlainUpdater
from .tiny_denoiser import TinyDenoiser

__all__ = ["PlainFakeScore"]


class PlainFakeScore(PlainUpdater):
    """Gradient descent on a second denoiser. Fits `unirl.numerics.train.updater.FakeScoreUpdater`."""

    is_alone = False
    steps_per_update = 1

    def __init__(self, model: TinyDenoiser) -> None:
        """Its weights are near those of the model."""
        self._model, self.net = model, copy.deepcopy(model.net)
        random = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for param in self.net.parameters():
                param.add_(0.03 * torch.randn(param.shape, generator=random).to(param.device))
        super().__init__(self.net)

    @contextmanager
    def in_use(self) -> Generator[None]:
        live, self._model.net = self._model.net, self.net
        try:
            yield
        finally:
            self._model.net = live
