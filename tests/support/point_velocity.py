"""Latent rollouts of data that is a single point, whose velocity is known in closed form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from unirl.core.types.inputs import Inputs
from unirl.core.types.request import LatentRequest, Request
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.core.types.track import Conditions, LatentSegment
from unirl.numerics.diffusion.rollout import sample_latents

SHAPE = (2, 3)


def velocity(x: Tensor, sigma: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
    """Velocity for data that is one point, `conditions["point"]`: v = (x - x0) / sigma."""
    return (x - conditions["point"]) / sigma.view(-1, 1, 1)


class Point:
    """The velocity as the model of a replay."""

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        return velocity(x, sigma, conditions)


def a_request(num_rows: int, *, steps: Sequence[Sequence[int]] | None = None, **changes: object) -> Request:
    ids = tuple(f"s{row}" for row in range(num_rows))
    chosen = torch.tensor([[]] * num_rows if steps is None else steps, dtype=torch.int64).reshape(num_rows, -1)
    settings = {"num_inference_steps": 4, "kernel": "flow-sde", "eta": 0.7, **changes}
    latent = LatentRequest(
        sampling=LatentSamplingConfig(**settings),
        sigmas=torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0]),
        sde_steps=chosen,
        noise_ids=ids,
        initial_noise=("",) * num_rows,
        keep=torch.zeros(num_rows, 0, dtype=torch.int64),
    )
    return Request(
        track="image",
        sample_ids=ids,
        group_ids=ids,
        inputs=Inputs.of_texts(ids),
        metadata=({},) * num_rows,
        params=latent,
        seed=1,
        rollout=0,
        policy_version=4,
    )


def conditions_of(num_rows: int, *points: float) -> dict[str, Conditions]:
    """One shared row for `positive`, and for `negative` where a second point is given."""
    index = torch.zeros(num_rows, dtype=torch.int64)
    return {
        name: Conditions(values={"point": torch.full((1, *SHAPE), point)}, index=index)
        for name, point in zip(("positive", "negative"), points, strict=False)
    }


def sample(request: Request, *points: float) -> LatentSegment:
    conditions = conditions_of(request.num_rows, *points)
    return sample_latents(velocity, request, latent_shape=SHAPE, conditions=conditions)
