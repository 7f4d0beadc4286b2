"""The bigrams' bench with a critic beside the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from token_algorithms import bigrams
from torch import Tensor
from unirl.algorithms.ppo.algorithm import Ppo
from unirl.algorithms.ppo.config import PpoConfig
from unirl.core.specs.config import TrainConfig
from unirl.core.types.track import Track
from unirl.numerics.tokens.replay import replay_values
from unirl.numerics.train.critic import with_values


class Critic(bigrams.Steps):
    """Fits `unirl.numerics.train.updater.CriticUpdater`."""

    is_alone = False
    steps_per_update = 1

    def __init__(self, seed: int, lr: float) -> None:
        self.net, self.packing = bigrams.BigramModel(seed, width_of_head=1), True
        super().__init__(self.net, lr=lr)

    def values(self, track: Track) -> Tensor:
        def of_batch(batch: Any) -> Tensor:
            return (self.net.hidden(batch) @ self.net.head.T).squeeze(1)

        return replay_values(of_batch, self.net, track, packing=self.packing)


class Bench(bigrams.Bench):
    """Its texts have rewards; the third token of each is not trained on."""

    def __init__(self, lengths: Sequence[int] = (5, 2, 3, 6, 1, 4), seed: int = 0, lr: float = 0.0) -> None:
        super().__init__(lengths, seed, lr)
        self.critic = Critic(seed + 2, lr)

    def judged(self, track: Track) -> Track:
        mask = tuple(torch.arange(length) != 2 for length in track.text.lengths)
        return dataclasses.replace(
            track,
            segment=dataclasses.replace(track.text, mask=mask),
            rewards=torch.tensor([1.0, 0.0, 0.5, 0.25, -1.0, 2.0] * 5)[: track.num_rows],
        )

    def anchored(
        self, algorithm: Ppo, track: Track | None = None, join: Callable[[Tensor], Tensor] = lambda x: x
    ) -> Any:
        """The track with advantages and returns, and the numbers that came with them."""
        return algorithm.after_anchor(
            with_values(algorithm.with_old_log_probs(track or self.track, self.replay()), self.critic), join
        )

    def train(self, algorithm: Any, track: Track | None = None, *, packing: bool = True, **settings: Any) -> Any:
        """The numbers of the updates; `gradient` and `critic.gradient` are then those of the last."""
        self.critic.packing = packing
        return super().train(algorithm, track, packing=packing, **{"critic": self.critic, **settings})

    def move(self, distance: float = 0.1) -> None:
        super().move(distance)
        self.critic.move(distance)


def make(config: PpoConfig | None = None, **settings: Any) -> Ppo:
    return Ppo(config or PpoConfig(**settings), train=TrainConfig())


class Anchored(Ppo):
    """With everything before the updates behind it, so that the weights may have moved since."""

    def __init__(self, algorithm: Ppo) -> None:
        self.__dict__ = algorithm.__dict__

    def with_old_log_probs(self, track: Track, replay: Any) -> Track:
        return track

    def after_anchor(self, track: Track, sum_over_ranks: Any) -> Any:
        return self.kept(track), {}

    def kept(self, track: Track) -> Track:
        """The values of before: the stack has asked the critic again."""
        given = {name: text for name, text in zip(self.before.sample_ids, range(self.before.num_rows), strict=True)}
        values = tuple(self.before.text.values[given[name]] for name in track.sample_ids)  # type: ignore[index]
        return dataclasses.replace(track, segment=dataclasses.replace(track.text, values=values))

    before: Track
