"""A critic of some thousand weights beside the small decoder or denoiser, so that algorithms with one can be tried."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from unirl.core.roles import TokenBatch
from unirl.core.types.track import Status, TextSegment, Track
from unirl.numerics.tokens.replay import replay_values
from unirl.numerics.train.track_replay import replay_step_values

from .plain_updater import PlainUpdater
from .tiny_decoder import WIDTH, TinyDecoder
from .tiny_denoiser import CHANNELS, TinyDenoiser

__all__ = ["PlainCritic"]


class PlainCritic(PlainUpdater):
    """Gradient descent on a separate network with one output. Fits `unirl.numerics.train.updater.CriticUpdater`.

    Its values for padding rows are NaN, so that any code that reads them is found out.
    """

    is_alone = False
    steps_per_update = 1

    def __init__(
        self,
        model: TinyDecoder | TinyDenoiser,
        *,
        is_fresh: bool = False,
        lr: float = 0.0,
        length: float | None = None,
    ) -> None:
        """model: lays texts out.  is_fresh: every value is 0 at first; else they differ.  lr, length: of its steps."""
        self._own = type(model)(seed=1, device=model.device)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(2)
            head = nn.Linear(WIDTH if isinstance(model, TinyDecoder) else CHANNELS, 1)
        if is_fresh:
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)
        self.net = nn.ModuleDict({"trunk": self._own.net, "head": head.to(model.device)})
        self._model, self.packing = model, True
        super().__init__(self.net, lr=lr, length=length)

    def values(self, track: Track) -> Tensor:
        result = self._of_tokens(track) if isinstance(track.segment, TextSegment) else self._of_steps(track)
        fills = torch.tensor([status is Status.PADDING for status in track.status], device=result.device)
        return result.masked_fill(fills[:, None], torch.nan)

    def _of_tokens(self, track: Track) -> Tensor:
        model = self._model
        assert isinstance(model, TinyDecoder)

        def critic(batch: TokenBatch) -> Tensor:
            return self.net["head"](model.hidden(batch, trunk=self.net["trunk"])).squeeze(1)

        return replay_values(critic, model, track, packing=self.packing)

    def _of_steps(self, track: Track) -> Tensor:
        """A linear function of the mean of each channel. Latents that are NaN, those of padding rows, are
        read as 0: they would spread through the gradient of the weights."""
        own = self._own
        latents = track.latent.latents.nan_to_num(nan=0.0)
        track = dataclasses.replace(track, segment=dataclasses.replace(track.latent, latents=latents))
        assert isinstance(own, TinyDenoiser)

        def critic(x: Tensor, sigma: Tensor, conditions: Mapping[str, Any]) -> Tensor:
            return self.net["head"](own.velocity(x, sigma, conditions).flatten(2).mean(2)).squeeze(1)

        return replay_step_values(critic, track, stacked=True)
