"""A model of latents: what claims about encoders, velocities, schedules and decoders need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from unirl.core.config import LatentSamplingConfig
from unirl.core.data import MediaRef
from unirl.core.reference import ReferenceRun, RunReference
from unirl.core.request import Request
from unirl.core.roles import DiffusionModel, Model
from unirl.core.track import Track

from ..workbench.requests import PROMPTS, make_request
from ..workbench.rollouts import sample_track
from .model import ModelBench

__all__ = ["NEGATIVE", "LatentModelBench"]

NEGATIVE = "a blur"
"""A negative prompt that no trial generates from."""


@dataclass(frozen=True, kw_only=True)
class LatentModelBench(ModelBench):
    @property
    def track(self) -> str:
        return self.workshop.track(self.subject.found("model"), "latent")

    def fresh_model(self) -> DiffusionModel:
        return cast(DiffusionModel, super().fresh_model())

    @contextmanager
    def model(self) -> Iterator[DiffusionModel]:
        with super().model() as model:
            yield cast(DiffusionModel, model)

    def learner(self) -> DiffusionModel:
        return cast(DiffusionModel, super().learner())

    def sampling(self, **settings: Any) -> LatentSamplingConfig:
        """Sampling settings that the miniature takes, with `settings` by dotted key laid over them."""
        return self.workshop.sampling(self.subject.found("model"), **settings)

    def read(self, model: Model, prompts: Sequence[str], media: Sequence[Sequence[MediaRef]]) -> None:
        cast(DiffusionModel, model).encode(list(prompts), sampling=self.sampling(), media=media)

    def encode(self, model: DiffusionModel, prompts: Sequence[str], **settings: Any) -> dict[str, Tensor]:
        return dict(model.encode(list(prompts), sampling=self.sampling(**settings)))

    def latents(self, model: DiffusionModel, rows: int, *, seed: int = 7) -> Tensor:
        """Standard normal latents, the same everywhere."""
        shape = (rows, *model.latent_shape(self.sampling()))
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.device)

    def inputs(self, model: DiffusionModel) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """x, sigma and conditions of one row per prompt, every row another one."""
        sigma = torch.linspace(0.9, 0.3, len(PROMPTS)).to(self.device)
        return self.latents(model, len(PROMPTS)), sigma, self.encode(model, PROMPTS)

    def answer(self, model: Model) -> Tensor:
        """The velocity of some latents, along a random direction."""
        latent = cast(DiffusionModel, model)
        x, sigma, conditions = self.inputs(latent)
        return (latent.velocity(x, sigma, conditions) * self.latents(latent, len(x), seed=8)).sum()

    def request(self, model: DiffusionModel, **sampling: Any) -> Request:
        """A request of 2 groups of 3 samples. sampling: by dotted key."""
        return make_request(model, {self.track: self.sampling(**sampling)})

    def rollout(self, model: Model) -> Track:
        """Samples of the model as it is now, made by the shared denoise loop, not decoded."""
        latent = cast(DiffusionModel, model)
        return sample_track(latent, self.request(latent, decode=False), self.track)

    def reference(self, sampling: LatentSamplingConfig, prompts: Sequence[str], initial: Tensor) -> ReferenceRun:
        """What the reference pipeline makes of it. Fails when the spec names none: every model promises parity."""
        assert self.spec.parity, (
            f"model {self.spec.name!r} names no `parity`, so nothing says that it is the model that it is called "
            "after; write the function that runs its reference pipeline"
        )
        run: RunReference = self.workshop.resolved(self.subject.found("model"), self.spec.parity)
        with torch.no_grad():
            return run(self.checkpoint(), prompts=list(prompts), sampling=sampling, initial=initial.clone())
