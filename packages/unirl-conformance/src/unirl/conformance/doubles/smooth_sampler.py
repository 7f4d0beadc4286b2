"""A sampler of three weights, in torch for algorithms that backpropagate rewards and in NumPy for finite differences.

v = w0 tanh(x + w1 sigma) + w2 sin(x), decoded to 0.5 + x / 20, scored by the mean of sin(5 pixel): nothing in it is
linear, so that a Jacobian too many or too few shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from unirl.core.roles import Algorithm, Forward, Losses
from unirl.core.types.inputs import Inputs
from unirl.core.types.track import Conditions, LatentSegment, Sampler, Status, Track
from unirl.numerics.loss.reduction import reduce_terms, weight_totals
from unirl.numerics.noise import noise
from unirl.numerics.train.track_replay import TrackReplay

__all__ = [
    "CLOSE",
    "SIGMAS",
    "STEPS",
    "WEIGHTS",
    "SmoothModel",
    "forward_of",
    "gradient_of",
    "loss_of",
    "mean_reward",
    "slope",
    "smooth_score",
    "stored_track",
    "velocity",
]

Numbers = NDArray[np.float64]
SIGMAS: Numbers = np.array([1.0, 0.9, 0.7, 0.5, 0.2, 0.0], dtype=np.float32).astype(np.float64)
STEPS = len(SIGMAS) - 1
WEIGHTS: Numbers = np.array([0.4, -0.7, 0.5])
CLOSE = {"rel": 1e-4, "abs": 1e-7}
"""Tolerance of fp32 gradients: means over 36 numbers of order 0.1, each of tens of operations of 6e-8, which partly
cancel."""


def velocity(weights: Numbers, x: Numbers, sigma: float) -> Numbers:
    """x: [n, ...]."""
    return weights[0] * np.tanh(x + weights[1] * sigma) + weights[2] * np.sin(x)


def mean_reward(latents: Numbers) -> float:
    """Mean over the rows of latents [n, ...]."""
    return float(np.sin(5 * (0.5 + latents / 20)).mean())


def slope(function: Callable[[Numbers], float]) -> Numbers:
    """[3]: central differences of a function of the weights, in fp64: the error is of the order of 1e-10."""
    step = 1e-6 * np.eye(len(WEIGHTS))
    return np.array([(function(WEIGHTS + each) - function(WEIGHTS - each)) / 2e-6 for each in step])


class SmoothModel:
    """The same in torch. Fits `unirl.core.roles.DiffusionModel` as far as losses ask."""

    def __init__(self) -> None:
        self.weights = torch.tensor(WEIGHTS, dtype=torch.float32, requires_grad=True)
        self.batch_sizes: list[int] = []
        """Size of the batch of each forward."""

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Any) -> Tensor:
        self.batch_sizes.append(len(x))
        at = sigma.view(-1, *(1,) * (x.ndim - 1))
        return self.weights[0] * torch.tanh(x + self.weights[1] * at) + self.weights[2] * torch.sin(x)

    def decode(self, latents: Tensor) -> Tensor:
        return 0.5 + latents / 20


def smooth_score(track: Track, media: Tensor) -> Tensor:
    """Implements `unirl.core.roles.GradientScore`."""
    values = torch.sin(5 * media).flatten(1).mean(dim=1)
    return torch.where(track.sample_weights > 0, values, 0.0)


def stored_track(rows: int = 3, *, version: int = 0) -> Track:
    """Euler steps from noise, rolled out in fp64 and stored in fp32.  version: of the policy."""
    ids = tuple(f"r0/p{row}/0" for row in range(rows))
    latents = [noise(seed=0, rollout=0, ids=ids, step=0, shape=(3, 2, 2)).double().numpy()]
    for sigma, after in itertools.pairwise(SIGMAS):
        latents.append(latents[-1] + (after - sigma) * velocity(WEIGHTS, latents[-1], sigma))
    return Track(
        name="image",
        sample_ids=ids,
        group_ids=ids,
        inputs=Inputs.of_texts(tuple(f"prompt {row}" for row in range(rows))),
        metadata=({},) * rows,
        conditions={"positive": Conditions(values={"text": torch.zeros(1, 1)}, index=torch.zeros(rows).long())},
        segment=LatentSegment(
            latents=torch.tensor(np.stack(latents, axis=1), dtype=torch.float32),
            positions=torch.arange(STEPS + 1).repeat(rows, 1),
            sde_steps=torch.zeros(rows, 0, dtype=torch.int64),
            sigmas=torch.tensor(SIGMAS, dtype=torch.float32),
            sampler=Sampler(kernel="euler", eta=0.0),
        ),
        sample_weights=torch.ones(rows),
        status=(Status.COMPLETED,) * rows,
        policy_version=(version,) * rows,
    )


def forward_of(model: SmoothModel) -> Forward:
    return TrackReplay(cast(Any, model), stacked=True, policy_context=lambda policy: nullcontext())


def loss_of(algorithm: Algorithm, track: Track, model: SmoothModel | None = None) -> tuple[Tensor, Losses]:
    """The loss of all rows as one micro-batch, and its terms."""
    losses = algorithm.loss(track, forward_of(model or SmoothModel()), progress=0.0)
    return reduce_terms(losses.terms, totals=weight_totals(algorithm.loss_weights(track))), losses


def gradient_of(algorithm: Algorithm, track: Track) -> Numbers:
    """[3] of the loss."""
    model = SmoothModel()
    loss, _ = loss_of(algorithm, track, model)
    return torch.autograd.grad(loss, model.weights)[0].double().numpy()
