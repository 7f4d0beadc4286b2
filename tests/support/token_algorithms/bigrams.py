"""A tiny language model, a rollout of it, and the train stack on top."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from unirl.core.roles import Algorithm, Job, OutputHead, Policy
from unirl.core.specs.config import TrainConfig
from unirl.core.specs.spec import ModelSpec
from unirl.core.types.inputs import Inputs
from unirl.core.types.track import Status, TextSegment, Track
from unirl.numerics.tokens.divergence import token_divergence
from unirl.numerics.tokens.log_probs import token_log_probs
from unirl.numerics.train.stack import StepReport, train_on
from unirl.numerics.train.track_replay import TrackReplay

__all__ = ["Bench", "BigramModel", "Steps"]

VOCABULARY, WIDTH = 7, 4


class BigramModel(torch.nn.Module):
    """A bigram model: embedding, then output projection. A `unirl.core.roles.TextModel`."""

    packs, pad_token, stop_tokens = True, 0, (0,)
    spec = ModelSpec(name="bigrams", summary="", build="", config="", tracks={"text": "text"}, trainable="")

    def __init__(self, seed: int, *, width_of_head: int = VOCABULARY) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        for name, rows in (("embedding", VOCABULARY), ("head", width_of_head)):
            drawn = torch.randn(rows, WIDTH, generator=random, dtype=torch.float64)
            setattr(self, name, torch.nn.Parameter(drawn))

    def hidden(self, batch: Any) -> Tensor:
        return self.embedding[batch.tokens.flatten()[batch.target_index]]

    def score(self, batch: Any, *, temperature: float, with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        hidden = self.hidden(batch)
        return token_log_probs(hidden, self.head, batch.targets, temperature=temperature, with_entropy=with_entropy)

    @torch.no_grad()
    def output_head(self, batch: Any) -> OutputHead:
        return OutputHead(hidden=self.hidden(batch), weight=self.head.clone())

    def divergence(self, batch: Any, *, teacher: OutputHead, **settings: Any) -> tuple[Tensor, Tensor]:
        return token_divergence(self.hidden(batch), self.head, batch.targets, teacher=teacher, chunk=3, **settings)


class Steps:
    """Gradient descent on a module; records the last gradient. Implements `unirl.numerics.train.stack.Updater` on one
    rank."""

    device, num_ranks, gradient_reduction = torch.device("cpu"), 1, "sum"

    def __init__(self, module: torch.nn.Module, *, lr: float) -> None:
        self.weights, self.lr, self.gradient, self.num_steps = list(module.parameters()), lr, torch.zeros(()), 0

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

    def move(self, distance: float = 0.1) -> None:
        """Away from the old policy, so that some tokens are clipped."""
        random = torch.Generator().manual_seed(9)
        with torch.no_grad():
            for value in self.weights:
                value.add_(distance * torch.randn(value.shape, generator=random, dtype=value.dtype))

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        return values

    def all_reduce_max(self, values: Tensor) -> Tensor:
        return values


class Bench(Steps):
    """A rollout of `BigramModel` with advantages, and updates on it by the train stack."""

    def __init__(self, lengths: Sequence[int] = (5, 2, 3, 6, 1, 4), seed: int = 0, lr: float = 0.0) -> None:
        self.model, self.reference = BigramModel(seed), BigramModel(seed + 1)
        super().__init__(self.model, lr=lr)
        self.track = self._rollout(lengths, torch.Generator().manual_seed(seed))

    def judged(self, track: Track) -> Track:
        """The track with advantages."""
        return dataclasses.replace(
            track, advantages=torch.tensor([1.25, -0.5, 0.75, -1.5, 0.25, 2.0][: track.num_rows])
        )

    def _rollout(self, lengths: Sequence[int], random: torch.Generator) -> Track:
        rows = len(lengths)
        text = TextSegment(
            prompt_tokens=tuple(torch.tensor([1, 2, 3][: 1 + row % 3]) for row in range(rows)),
            tokens=tuple(torch.randint(VOCABULARY, (length,), generator=random) for length in lengths),
        )
        track = self.judged(
            Track(
                name="text",
                sample_ids=tuple(f"p{row // 3}/{row}" for row in range(rows)),
                group_ids=tuple(f"p{row // 3}" for row in range(rows)),
                inputs=Inputs.of_texts(("p",) * rows),
                metadata=({},) * rows,
                segment=text,
                sample_weights=torch.ones(rows),
                status=tuple(Status.TRUNCATED if length == 6 else Status.COMPLETED for length in lengths),
                policy_version=(0,) * rows,
            )
        )
        with torch.no_grad():
            result = self.replay()(track).log_probs
        # From an engine with a small log-prob mismatch.
        off = result + 0.05 * torch.randn(result.shape, generator=random)
        made = tuple(row[:length].float() for row, length in zip(off, lengths, strict=True))
        return dataclasses.replace(track, segment=dataclasses.replace(track.text, log_probs=made))

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
        return TrackReplay(self.model, stacked=True, policy_context=self.policy, packing=packing)

    def train(
        self, algorithm: Algorithm, track: Track | None = None, *, packing: bool = True, **settings: Any
    ) -> dict[str, float]:
        """The metrics of the updates; `gradient` is then that of the last."""
        further = {name: settings.pop(name) for name in ("progress", "critic") if name in settings}
        report = train_on(
            [Job(track=track or self.track, algorithm=algorithm)],
            forward=self.replay(packing=packing),
            updater=self,
            train=TrainConfig(packing=packing, **settings),
            **{"progress": 0.0, **further},
        )
        return {**report.only, "updates": float(report.num_updates)}
