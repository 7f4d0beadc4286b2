"""A language model of a few numbers with a critic beside it, a rollout of it, and the train stack over both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from unirl.algorithms.ppo.algorithm import Ppo
from unirl.algorithms.ppo.config import PpoConfig
from unirl.core.config import TrainConfig
from unirl.core.roles import Algorithm, Policy
from unirl.core.track import Status, TextSegment, Track
from unirl.numerics.critic import with_values
from unirl.numerics.stack import StepReport, train_on
from unirl.numerics.text_replay import replay_values
from unirl.numerics.token_log_probs import token_log_probs
from unirl.numerics.track_replay import TrackReplay

VOCABULARY, WIDTH = 7, 4


class BigramModel(torch.nn.Module):
    """Each token follows from the one before it: embedding, then output projection. A `unirl.core.roles.TextModel`."""

    packs, pad_token, stop_tokens = True, 0, (0,)

    def __init__(self, seed: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        for name, rows in (("embedding", VOCABULARY), ("head", VOCABULARY), ("value", 1)):
            drawn = torch.randn(rows, WIDTH, generator=random, dtype=torch.float64)
            setattr(self, name, torch.nn.Parameter(drawn))

    def hidden(self, batch: Any) -> Tensor:
        return self.embedding[batch.tokens.flatten()[batch.target_index]]

    def score(self, batch: Any, *, temperature: float, with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        hidden = self.hidden(batch)
        return token_log_probs(hidden, self.head, batch.targets, temperature=temperature, with_entropy=with_entropy)


class Steps:
    """Gradient descent on some weights, which notes the last gradient."""

    def __init__(self, weights: Sequence[torch.nn.Parameter], lr: float) -> None:
        self.weights, self.lr, self.gradient, self.num_steps = list(weights), lr, torch.zeros(()), 0

    def zero_grad(self) -> None:
        for value in self.weights:
            value.grad = None

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()

    def step(self) -> StepReport:
        gradients = [value.grad if value.grad is not None else torch.zeros_like(value) for value in self.weights]
        self.gradient = torch.cat([gradient.flatten() for gradient in gradients])
        with torch.no_grad():
            for value, gradient in zip(self.weights, gradients, strict=True):
                value.sub_(self.lr * gradient)
        self.num_steps += 1
        return StepReport(grad_norm=float(self.gradient.norm()), grad_rms=0.0)


class Critic(Steps):
    """Fits `unirl.numerics.critic.CriticUpdater`."""

    is_alone = False

    def __init__(self, seed: int, lr: float) -> None:
        self.net, self.packing = BigramModel(seed), True
        super().__init__([self.net.embedding, self.net.value], lr)  # type: ignore[list-item]

    def values(self, track: Track) -> Tensor:
        def of_batch(batch: Any) -> Tensor:
            return (self.net.hidden(batch) @ self.net.value.T).squeeze(1)  # type: ignore[operator]

        return replay_values(of_batch, self.net, track.text, packing=self.packing)  # type: ignore[arg-type]


class Bench(Steps):
    """A rollout of `BigramModel`, and updates on it by the train stack."""

    device, num_ranks, gradient_reduction = torch.device("cpu"), 1, "sum"

    def __init__(self, lengths: Sequence[int] = (5, 2, 3, 6, 1, 4), seed: int = 0, lr: float = 0.0) -> None:
        self.model, self.reference, self.critic = BigramModel(seed), BigramModel(seed + 1), Critic(seed + 2, lr)
        super().__init__([self.model.embedding, self.model.head], lr)  # type: ignore[list-item]
        self.track = self._rollout(lengths, torch.Generator().manual_seed(seed))

    def _rollout(self, lengths: Sequence[int], random: torch.Generator) -> Track:
        rows = len(lengths)
        text = TextSegment(
            prompt_tokens=tuple(torch.tensor([1, 2, 3][: 1 + row % 3]) for row in range(rows)),
            tokens=tuple(torch.randint(VOCABULARY, (length,), generator=random) for length in lengths),
            mask=tuple(torch.arange(length) != 2 for length in lengths),
        )
        track = Track(
            name="text",
            sample_ids=tuple(f"p{row // 3}/{row}" for row in range(rows)),
            group_ids=tuple(f"p{row // 3}" for row in range(rows)),
            prompts=("p",) * rows,
            metadata=({},) * rows,
            segment=text,
            rewards=torch.tensor([1.0, 0.0, 0.5, 0.25, -1.0, 2.0] * 5)[:rows],
            weights=torch.ones(rows),
            status=tuple(Status.TRUNCATED if length == 6 else Status.COMPLETED for length in lengths),
            policy_version=(0,) * rows,
        )
        with torch.no_grad():
            found = self.replay()(track).log_probs
        # Those of an engine that is a little off.
        off = found + 0.05 * torch.randn(found.shape, generator=random)
        made = tuple(row[:length].float() for row, length in zip(off, lengths, strict=True))
        return dataclasses.replace(track, segment=dataclasses.replace(text, log_probs=made))

    @contextmanager
    def policy(self, which: Policy = "live") -> Iterator[None]:
        live = {name: value.data for name, value in self.model.named_parameters()}
        other = dict(self.reference.named_parameters()) if which == "reference" else live
        for name, value in self.model.named_parameters():
            value.data = other[name].data
        yield
        for name, value in self.model.named_parameters():
            value.data = live[name]

    def replay(self, *, packing: bool = True) -> TrackReplay:
        return TrackReplay(self.model, stacked=True, policy_context=self.policy, packing=packing)  # type: ignore[arg-type]

    def anchored(
        self, algorithm: Ppo, track: Track | None = None, join: Callable[[Tensor], Tensor] = lambda x: x
    ) -> Any:
        """The track with advantages and returns, and the numbers that came with them."""
        return algorithm.after_anchor(
            with_values(algorithm.anchor(track or self.track, self.replay()), self.critic), join
        )

    def train(
        self, algorithm: Algorithm, track: Track | None = None, *, packing: bool = True, **settings: Any
    ) -> dict[str, float]:
        """The numbers of the updates; `gradient` and `critic.gradient` are then those of the last."""
        self.critic.packing = packing
        chosen = {"updates": 1, "micro_batch": 0, "progress": 0.0, "critic": self.critic, **settings}
        report = train_on(track or self.track, algorithm, replay=self.replay(packing=packing), apply=self, **chosen)  # type: ignore[arg-type]
        return {**report.metrics, "updates": float(report.num_updates)}

    def move(self, distance: float = 0.1) -> None:
        """Away from the anchor, so that clips bind on some tokens."""
        random = torch.Generator().manual_seed(9)
        with torch.no_grad():
            for value in (*self.weights, *self.critic.weights):
                value.add_(distance * torch.randn(value.shape, generator=random, dtype=value.dtype))

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        return values

    def all_reduce_max(self, values: Tensor) -> Tensor:
        return values


def make(config: PpoConfig | None = None, **settings: Any) -> Ppo:
    return Ppo(config or PpoConfig(**settings), train=TrainConfig())


class Anchored(Ppo):
    """With everything before the updates behind it, so that the weights may have moved since."""

    def __init__(self, algorithm: Ppo) -> None:
        self.__dict__ = algorithm.__dict__

    def anchor(self, track: Track, replay: Any) -> Track:
        return track

    def after_anchor(self, track: Track, sum_over_ranks: Any) -> Any:
        return self.kept(track), {}

    def kept(self, track: Track) -> Track:
        """The values of before: the stack has asked the critic again."""
        given = {name: text for name, text in zip(self.before.sample_ids, range(self.before.num_rows), strict=True)}
        values = tuple(self.before.text.values[given[name]] for name in track.sample_ids)  # type: ignore[index]
        return dataclasses.replace(track, segment=dataclasses.replace(track.text, values=values))

    before: Track
