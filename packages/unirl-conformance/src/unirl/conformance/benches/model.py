"""A model on its miniature: what claims about any model need. Those about latents and text have more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from unirl.core.data import MediaRef
from unirl.core.roles import Model
from unirl.core.spec import Miniature, ModelSpec
from unirl.core.track import Track
from unirl.numerics.track_replay import TrackReplay

from .base import Bench

__all__ = ["ModelBench", "relative_gap"]


@dataclass(frozen=True, kw_only=True)
class ModelBench(Bench):
    @property
    def spec(self) -> ModelSpec:
        return cast(ModelSpec, self.subject.found("model").spec)

    @property
    def tiny(self) -> Miniature:
        return self.workshop.miniature(self.subject.found("model"))

    def checkpoint(self, *, seed: int = 0, again: bool = False) -> Path:
        """A folder with the miniature; with `again` it is written anew."""
        return self.workshop.checkpoint(self.subject.found("model"), seed=seed, again=again)

    def fresh_model(self) -> Model:
        """The model on its miniature, this claim's own: it may be changed."""
        return self.workshop.fresh_model(self.subject.found("model"), device=self.device)

    @contextmanager
    def model(self) -> Iterator[Model]:
        """The model that all claims share, for looking at: in evaluation mode and without gradient inside the block.

        As engines and backends use it; the training mode of every submodule is restored.
        """
        model = self.workshop.model(self.subject.found("model"), device=self.device)
        with torch.no_grad(), evaluating(model.trainable):
            yield model

    def learner(self) -> Model:
        """A model of this claim's own that takes gradients, in evaluation mode, as backends hold it."""
        model = self.fresh_model()
        model.trainable.eval()
        for param in model.trainable.parameters():
            param.requires_grad_(param.is_floating_point())
        return model

    def read(self, model: Model, prompts: Sequence[str], media: Sequence[Sequence[MediaRef]]) -> None:
        """Give prompts with media to whatever of the model reads prompts."""
        raise NotImplementedError

    def rollout(self, model: Model) -> Track:
        """Samples of the model as it is now, made by the loop that all engines in process share."""
        raise NotImplementedError

    def answer(self, model: Model) -> Tensor:
        """A number that depends on all that the model computes, with gradient."""
        raise NotImplementedError

    def replay(self, model: Model, *, stacked: bool = True, packing: bool = True) -> TrackReplay:
        return TrackReplay(model, stacked=stacked, packing=packing, policy_context=lambda which: torch.no_grad())

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
