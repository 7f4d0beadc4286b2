"""A model on its miniature: what claims about encoders, velocities, schedules and decoders need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from unirl.core.config import LatentSamplingConfig
from unirl.core.reference import ReferenceRun, RunReference
from unirl.core.request import Request
from unirl.core.roles import DiffusionModel
from unirl.core.spec import Miniature, ModelSpec
from unirl.core.track import Track
from unirl.numerics.track_replay import TrackReplay

from ..workbench.requests import PROMPTS, make_request
from ..workbench.rollouts import sample_track
from .base import Bench

__all__ = ["NEGATIVE", "ModelBench", "relative_gap"]

NEGATIVE = "a blur"
"""A negative prompt that no trial generates from."""


@dataclass(frozen=True, kw_only=True)
class ModelBench(Bench):
    @property
    def spec(self) -> ModelSpec:
        return cast(ModelSpec, self.subject.found("model").spec)

    @property
    def tiny(self) -> Miniature:
        return self.workshop.miniature(self.subject.found("model"))

    @property
    def track(self) -> str:
        return self.workshop.latent_track(self.subject.found("model"))

    def checkpoint(self, *, seed: int = 0, again: bool = False) -> Path:
        """A folder with the miniature; with `again` it is written anew."""
        return self.workshop.checkpoint(self.subject.found("model"), seed=seed, again=again)

    def fresh_model(self) -> DiffusionModel:
        """The model on its miniature, this claim's own: it may be changed."""
        return self.workshop.fresh_model(self.subject.found("model"), device=self.device)

    @contextmanager
    def model(self) -> Iterator[DiffusionModel]:
        """The model that all claims share, for looking at: in evaluation mode and without gradient inside the block.

        As engines and backends use it; the training mode of every submodule is restored.
        """
        model = self.workshop.model(self.subject.found("model"), device=self.device)
        with torch.no_grad(), evaluating(model.trainable):
            yield model

    def learner(self) -> DiffusionModel:
        """A model of this claim's own that takes gradients, in evaluation mode, as backends hold it."""
        model = self.fresh_model()
        model.trainable.eval()
        for param in model.trainable.parameters():
            param.requires_grad_(param.is_floating_point())
        return model

    def sampling(self, **settings: Any) -> LatentSamplingConfig:
        """Sampling settings that the miniature takes, with `settings` by dotted key laid over them."""
        return self.workshop.sampling(self.subject.found("model"), **settings)

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

    def request(self, model: DiffusionModel, **sampling: Any) -> Request:
        """A request of 2 groups of 3 samples. sampling: by dotted key."""
        return make_request(model, {self.track: self.sampling(**sampling)})

    def rollout(self, model: DiffusionModel, **sampling: Any) -> Track:
        """Samples of the model as it is now, made by the shared denoise loop, not decoded."""
        return sample_track(model, self.request(model, decode=False, **sampling), self.track)

    def replay(self, model: DiffusionModel, *, stacked: bool) -> TrackReplay:
        return TrackReplay(model, stacked=stacked, policy_context=lambda which: torch.no_grad())

    def reference(self, sampling: LatentSamplingConfig, prompts: Sequence[str], initial: Tensor) -> ReferenceRun:
        """What the reference pipeline makes of it. Fails when the spec names none: every model promises parity."""
        assert self.spec.parity, (
            f"model {self.spec.name!r} names no `parity`, so nothing says that it is the model that it is called "
            "after; write the function that runs its reference pipeline"
        )
        run: RunReference = self.workshop.resolved(self.subject.found("model"), self.spec.parity)
        with torch.no_grad():
            return run(self.checkpoint(), prompts=list(prompts), sampling=sampling, initial=initial.clone())

    def lora_layers(self, module: nn.Module) -> Mapping[str, list[str]]:
        """Names of the linear layers that each of the spec's `lora_targets` matches."""
        linear = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
        return {
            target: [name for name in linear if name == target or name.endswith(f".{target}")]
            for target in self.spec.lora_targets
        }


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; each submodule's own mode is back after it."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def relative_gap(found: Tensor, wanted: Tensor) -> float:
    """Largest |found - wanted|, as a share of the largest |wanted|."""
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).abs().max()) / max(float(wanted.abs().max()), 1e-30)
