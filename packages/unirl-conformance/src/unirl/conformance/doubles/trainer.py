"""A backend with the model that it trains, as claims inspect it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from unirl.core.roles import Algorithm, Backend, Job, Policy, TrainReport
from unirl.core.types.track import Track

from .ppo import PPO
from .tiny_decoder import TinyDecoder
from .tiny_denoiser import TinyDenoiser

__all__ = ["Trainer", "Training", "largest_gap"]

Training = Literal["full", "lora"]


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A backend and the model that it trains, inspected through the backend alone: it may wrap the module in place."""

    backend: Backend
    model: TinyDenoiser | TinyDecoder
    training: Training
    policies: tuple[Policy, ...]
    """Policies besides the live one that it keeps."""
    plain: Mapping[str, Tensor] = field(repr=False)
    """The weights of the module before the backend had it, by name."""

    @property
    def denoiser(self) -> TinyDenoiser:
        assert isinstance(self.model, TinyDenoiser)
        return self.model

    def trained(self, policy: Policy = "live") -> dict[str, Tensor]:
        """Copies of the trained weights: all by their plain names, or the adapters."""
        tensors = self.backend.export_weights(policy=policy, kind=self.training).tensors
        return {name: tensor.clone() for name, tensor in tensors.items()}

    def exported_version(self, policy: Policy) -> int:
        return self.backend.export_weights(policy=policy, kind=self.training).version

    def whole(self, policy: Policy = "live") -> dict[str, Tensor]:
        """Copies of all weights of the module by their plain names, adapters folded in."""
        kind = "full" if self.training == "full" else "merged"
        tensors = self.backend.export_weights(policy=policy, kind=kind).tensors
        missing = [name for name in self.plain if name not in tensors]
        assert not missing, f"{kind!r} weights lack {missing[0]!r}; they have {', '.join(sorted(tensors)[:3])}, ..."
        return {name: tensors[name].clone() for name in self.plain}

    def everything(self) -> dict[str, Tensor]:
        """Trained weights of every policy that is kept, by policy and name; of the reference, all weights."""
        result = {f"live {name}": value for name, value in self.trained().items()}
        for policy in self.policies:
            weights = self.whole(policy) if policy == "reference" else self.trained(policy)
            result |= {f"{policy} {name}": value for name, value in weights.items()}
        return result

    def velocity(self, of: Callable[..., Tensor] | None = None) -> Tensor:
        """The model's velocity at fixed points with the weights in use. of: another function in its place."""
        x = torch.linspace(-2, 2, 3 * 4 * 3 * 2).view(3, 4, 3, 2).to(self.model.device)
        sigma = torch.tensor([0.9, 0.5, 0.2]).to(self.model.device)
        text = torch.linspace(-1, 1, 3 * 6).view(3, 6).to(self.model.device)
        with torch.no_grad():
            return (of or self.denoiser.velocity)(x, sigma, {"text": text})

    def train(self, track: Track, algorithm: Algorithm | None = None) -> TrainReport:
        """One call of the backend's `train`, with PPO by default."""
        return self.backend.train([Job(track=track, algorithm=algorithm or PPO())], progress=0.25)


def largest_gap(result: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Largest difference over all tensors. Fails when their names differ."""
    assert result.keys() == expected.keys(), f"names differ: {sorted(result.keys() ^ expected.keys())[:3]}"
    return max(float((result[name] - value).detach().abs().max()) for name, value in expected.items())
