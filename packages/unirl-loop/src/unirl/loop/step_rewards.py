"""Per-step rewards: how much each SDE step changed the expected reward.

The expected reward of a latent is that of the sample which the remaining steps produce without noise. Noise is a
function of the sample's id and the step, so this sample is one more row of a request: it has the same noise up to that
step and no SDE steps after it. Any engine that takes SDE steps per row can generate it.

Source: DenseGRPO, arXiv 2601.20218, equations 7 to 9 with n = t, all of the remaining steps. Its noise levels by step
are not here: `sampling.sde` chooses the steps that have noise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unirl.core.types.request import Request
    from unirl.core.types.track import Track

__all__ = ["expectation_requests", "step_reward_metrics", "with_step_rewards"]


def expectation_requests(requests: Mapping[str, Request]) -> dict[str, Request]:
    """For each request of N samples with S SDE steps, one of N x S samples: those expected before each step. Only their
    clean latents are kept."""
    return {name: _expectations(request) for name, request in requests.items()}


def _expectations(request: Request) -> Request:
    import torch

    params = request.latent
    steps, count = params.sde_steps, int(params.sde_steps.shape[1])
    rows = [row for row in range(request.num_rows) for _ in range(count)]
    taken = torch.arange(count) < torch.arange(count).repeat(request.num_rows)[:, None]
    own = tuple((sample,) * (len(params.sigmas) - 1) for sample in request.sample_ids)
    every = dataclasses.replace(
        params,
        step_noise_ids=params.step_noise_ids or own,
        train_steps=params.scored_steps[:, :0],
        keep=params.keep[:, :0],
    ).select(rows)
    return dataclasses.replace(
        request.select(rows),
        sample_ids=tuple(
            _id(sample, int(step)) for sample, own in zip(request.sample_ids, steps, strict=True) for step in own
        ),
        params=dataclasses.replace(every, sde_steps=torch.where(taken, every.sde_steps, -1)),
    )


def with_step_rewards(track: Track, expected: Track) -> Track:
    """The track with `LatentSegment.step_rewards`; a sample that lacks one gets weight 0.

    expected: the scored samples of `expectation_requests`. What a step gained is the reward expected before the next
    one, or that of the sample after the last, less the reward expected before it.
    """
    import torch

    segment = track.latent
    places = {sample: place for place, sample in enumerate(expected.sample_ids)}
    rows = torch.tensor(
        [
            [places[_id(sample, int(step))] for step in steps]
            for sample, steps in zip(track.sample_ids, segment.sde_steps, strict=True)
        ]
    )
    gains = {
        name: torch.cat([expected.reward_parts[name][rows], track.reward_parts[name][:, None]], dim=1).diff(dim=1)
        for name in expected.reward_weights
    }
    counts = (expected.sample_weights[rows] > 0).all(dim=1).to(track.sample_weights)
    return dataclasses.replace(
        track,
        segment=dataclasses.replace(segment, step_rewards=gains),
        sample_weights=track.sample_weights * counts,
    )


def step_reward_metrics(track: Track) -> dict[str, float]:
    """`step_reward/<step>/raised` for each SDE step, counted from 0: the share of samples whose reward it raised.

    Of steps with too much noise it is near 0: nearly every draw is worse than no noise.
    """
    import torch

    segment = track.latent
    weighted = {name: weight for name, weight in track.reward_weights.items() if weight}
    total = torch.stack([weight * segment.step_rewards[name] for name, weight in weighted.items()]).sum(dim=0)
    result: dict[str, float] = {}
    for step in segment.sde_steps.unique().tolist():
        own = total[(segment.sde_steps == step) & (track.sample_weights > 0)[:, None]]
        if step >= 0 and own.numel():
            result[f"step_reward/{step}/raised"] = float((own > 0).float().mean())
    return result


def _id(sample: str, step: int) -> str:
    return f"{sample}/before-{step}"
