"""The networks of critics: a copy of the model with one output, for tokens or for denoise steps."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from unirl.core.errors import RecipeError
from unirl.core.roles import TokenBatch, diffusion_model, text_model
from unirl.numerics.tokens.replay import replay_values
from unirl.numerics.train.track_replay import replay_step_values

from .sharding import allocate

if TYPE_CHECKING:
    from unirl.core.roles import Model
    from unirl.core.types.track import Track

__all__ = ["CriticNet", "StepCriticNet", "TokenCriticNet", "critic_net"]

POOLED = 64
"""Numbers that the output of a denoiser is averaged to."""


def critic_net(model: Model, *, in_model_dtype: bool) -> CriticNet:
    """For the tokens of a text model, else for the denoise steps of a diffusion model.

    Create it before the model is adapted or wrapped: it starts from the checkpoint's weights.
    in_model_dtype: see `TokenCriticNet`.
    """
    if "text" in model.spec.tracks.values():
        return TokenCriticNet(model, in_model_dtype=in_model_dtype)
    return StepCriticNet(model)


class CriticNet(nn.Module):
    """A copy of a part of the model, fp32 where it trains, with a linear head. Head and values start at 0."""

    def __init__(self, model: Model, original: nn.Module, *, features: int) -> None:
        """original: the part that is copied.  features: inputs of the head."""
        super().__init__()
        self.place = next(name for name, part in model.trainable.named_modules() if part is original)
        """Name of the part within the model's trainable module."""
        self.trunk = copy.deepcopy(original).eval()
        for param in self.trunk.parameters():
            param.data = param.data.float() if param.requires_grad else param.data
        self.head = nn.Linear(features, 1, device=torch.device(model.device))
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @abstractmethod
    def values(self, track: Track, *, packing: bool, stacked: bool) -> Tensor:
        """[n, S] fp32 before each action of these rows, with gradient unless in no_grad; 0 where there is none.

        packing, stacked: as in `unirl.numerics.train.track_replay.TrackReplay`.
        """

    def tensor_parallel(self, plan: Mapping[str, str]) -> dict[str, str]:
        """The entries of a model's plan for its trunk, under the names used here."""
        prefix = f"{self.place}." if self.place else ""
        return {f"trunk.{name.removeprefix(prefix)}": how for name, how in plan.items() if name.startswith(prefix)}

    def fill(self, model: Model) -> None:
        """Allocate a trunk without values, each rank its shards, and fill it from the checkpoint."""
        allocate(self, torch.device(model.device))
        prefix = f"{self.place}." if self.place else ""
        tensors = self.trunk.state_dict(keep_vars=True)
        model.fill({f"{prefix}{name}": tensor for name, tensor in tensors.items()})


class TokenCriticNet(CriticNet):
    """The trunk of a text model, with the head in place of its output projection."""

    def __init__(self, model: Model, *, in_model_dtype: bool = False) -> None:
        """in_model_dtype: the policy computes in the dtype of the model's weights, as with adapters and without mixed
        precision. Where that has 16 bits, so does the trunk."""
        text = text_model(model)
        super().__init__(model, text.trunk, features=text.hidden_size)
        self._model = text
        self._sixteen = _sixteen_bits(model) if in_model_dtype else None

    def forward(self, batch: TokenBatch) -> Tensor:
        """[T, 1] fp32, before each target of the batch. The output is fp32 also where the trunk computes in 16 bits."""
        with _autocast(torch.device(self._model.device).type, self._sixteen):
            states: Tensor = self._model.hidden(batch, trunk=self.trunk)
        return self.head(states.float())

    def values(self, track: Track, *, packing: bool, stacked: bool) -> Tensor:
        return replay_values(lambda batch: self(batch).squeeze(1), self._model, track, packing=packing)


class StepCriticNet(CriticNet):
    """A denoiser, whose output is averaged to `POOLED` numbers for the head: V(x, sigma, conditions).

    Each is the mean of a run of neighbours in the flattened output, so that latents of any shape have as many. All
    weights train, the output projection included, which makes it a head on means of the last hidden states.
    """

    def __init__(self, model: Model) -> None:
        """Raises RecipeError for a model that does not run the attribute that its spec names as `trainable`."""
        super().__init__(model, model.trainable, features=POOLED)
        # The model itself, with the copy in the place of what the policy trains; encoders and VAE are the same.
        twin = copy.copy(model)
        setattr(twin, model.spec.trainable, self.trunk)
        if twin.trainable is not self.trunk:
            raise RecipeError(
                f"backend.critic.lr: a critic runs a copy of model.{model.spec.trainable}, but model "
                f"{model.spec.name!r} keeps its trainable module elsewhere; correct `trainable` in the model's spec."
            )
        self._velocity = diffusion_model(twin).velocity
        self._sixteen = _sixteen_bits(model)

    def forward(self, x: Tensor, sigma: Tensor, conditions: Mapping[str, Any]) -> Tensor:
        """[B, 1] fp32, before a step from x [B, ...] at sigma [B]."""
        with _autocast(x.device.type, self._sixteen):
            output = self._velocity(x, sigma, conditions)
        flat = output.float().flatten(1)
        runs = pad(flat, (0, -flat.shape[1] % POOLED)).view(len(flat), POOLED, -1)
        return self.head(runs.mean(dim=2))

    def values(self, track: Track, *, packing: bool, stacked: bool) -> Tensor:
        def critic(x: Tensor, sigma: Tensor, conditions: Mapping[str, Any]) -> Tensor:
            return self(x, sigma, conditions).squeeze(1)

        return replay_step_values(critic, track, stacked=stacked)


def _sixteen_bits(model: Model) -> torch.dtype | None:
    """Dtype that the model computes in, where its weights have one of 16 bits: those of its copy are fp32."""
    dtypes = {param.dtype for param in model.trainable.parameters() if param.requires_grad}
    return next((dtype for dtype in dtypes if dtype in (torch.bfloat16, torch.float16)), None)


def _autocast(device_type: str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    # Without its cache of cast weights, which would hold all of a sharded module at once.
    return torch.autocast(device_type, dtype=dtype, cache_enabled=False) if dtype else nullcontext()
