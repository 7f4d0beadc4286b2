"""The training that a backend stands for, by torch alone: plain weights, autograd, AdamW. No wrapping, no batching."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import functional_call
from unirl.core.roles import Replayed
from unirl.core.types.track import Track
from unirl.numerics.diffusion.replay import replay
from unirl.numerics.diffusion.sampler import kernel_of

from .model import WorkbenchModel
from .surrogate import PULL, clipped, squared_distance

if TYPE_CHECKING:
    from .trainee import Trainee

__all__ = ["PlainTraining", "plain_of", "velocity_of", "with_adapters"]

Weights = Mapping[str, Tensor]


def with_adapters(base: Weights, adapters: Weights, *, scale: float) -> dict[str, Tensor]:
    """base + scale B A for every layer that has `<layer>.lora_A.weight` and `<layer>.lora_B.weight`."""
    whole = dict(base)
    for name, a in adapters.items():
        layer, result, _ = name.partition(".lora_A.")
        if result:
            b = adapters[f"{layer}.lora_B.weight"]
            whole[f"{layer}.weight"] = base[f"{layer}.weight"] + scale * (b @ a)
    return whole


def velocity_of(model: WorkbenchModel, weights: Weights) -> Any:
    """The model's velocity with these weights in place of its own."""

    def velocity(x: Tensor, sigma: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        result: Tensor = functional_call(model.net, dict(weights), (x, conditions["text"], sigma))
        return result.float()

    return velocity


def plain_of(trainee: Trainee, **settings: Any) -> PlainTraining:
    """Training by torch alone from the weights that a trainee has now."""
    scale = trainee.backend.export_weights(kind=trainee.training).adapter_scale
    return PlainTraining(
        trainee.trained(), base=trainee.plain if trainee.training == "lora" else None, scale=scale, **settings
    )


class PlainTraining:
    """Trains copies of `weights`: all of a plain module, or adapters over `base`."""

    def __init__(
        self,
        weights: Weights,
        *,
        base: Weights | None = None,
        scale: float = 1.0,
        max_grad_norm: float | None = None,
        **adamw: Any,
    ) -> None:
        """base: whole weights that adapters are laid over, times `scale`.  adamw: settings of torch.optim.AdamW."""
        self.weights = {name: value.detach().clone().requires_grad_() for name, value in weights.items()}
        self._base, self._scale, self._bound = base, scale, max_grad_norm
        self._adam = torch.optim.AdamW(self.weights.values(), **adamw)
        self._model = WorkbenchModel()

    def whole(self) -> Weights:
        """All weights of the module, by their plain names."""
        return self.weights if self._base is None else with_adapters(self._base, self.weights, scale=self._scale)

    def replayed(self, track: Track, weights: Weights | None = None) -> Replayed:
        """The transitions of a track under some weights, those that train by default."""
        segment = track.latent
        return replay(
            velocity_of(self._model, self.whole() if weights is None else weights),
            latents=segment.latents,
            positions=segment.positions,
            sigmas=segment.sigmas,
            sde_steps=segment.sde_steps,
            kernel=kernel_of(segment.sampler),
            conditions={"positive": track.conditions["positive"].expanded()},
        )

    def step(self, track: Track, *, pull_to: Weights | None = None) -> float:
        """One update with the loss of `Surrogate` on all rows; returns the gradient's norm before clipping."""
        with torch.no_grad():
            old = self.replayed(track).log_probs
            others = None if pull_to is None else self.replayed(track, pull_to).means
        assert track.advantages is not None
        new = self.replayed(track)
        values = clipped(new.log_probs - old, track.advantages)
        if others is not None:
            values = values + PULL * squared_distance(new.means, others)
        weights = track.sample_weights[:, None].expand_as(values)
        return self.descend((values * weights).sum() / weights.sum())

    def velocity(self) -> Any:
        """The model's velocity with the weights that train, with gradient."""
        return velocity_of(self._model, self.whole())

    def descend(self, loss: Tensor) -> float:
        """One update against the gradient of a loss; returns its norm before clipping."""
        loss.backward()
        bound = torch.inf if self._bound is None else self._bound
        norm = torch.nn.utils.clip_grad_norm_(self.weights.values(), bound)
        self._adam.step()
        self._adam.zero_grad()
        return float(norm)
