"""Points of stored trajectories, for losses over velocities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from unirl.core.errors import BatchError

from ..forward_process import drawn, forward_sigmas

if TYPE_CHECKING:
    from unirl.core.types.track import LatentSegment

    from ..forward_config import ForwardConfig

__all__ = ["stored_points"]


def stored_points(
    segment: LatentSegment, config: ForwardConfig, *, seed: int, ids: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """Latents that the sampler passed, `config.num_points` of each trajectory, the clean end not among them.

    One step is drawn in each of as many equal parts of the schedule, within the quantiles `config.point_range` from
    clean to noise; as many points as steps are all of them. A pure function of (seed, id), the same in every update of
    a rollout.
    Returns latents [n, k, ...] fp32 and their noise levels [n, k] fp32. Raises BatchError for a position that the
    rollout has not stored.
    """
    first, last = config.point_range
    quantiles = forward_sigmas(seed=seed, ids=ids, draws=config.num_points, between=(first, last))
    # fp64: a quantile just below the end of its part must not round to the next one.
    quantiles = quantiles[:, drawn(segment, config.num_points)]
    rising = (quantiles.double() * segment.num_steps).long().clamp(max=segment.num_steps - 1)
    positions = segment.num_steps - 1 - rising
    is_there = segment.positions.cpu()[:, None, :] == positions[:, :, None]
    if not bool(is_there.any(dim=2).all()):
        row, column = (int(index) for index in (~is_there.any(dim=2)).nonzero()[0])
        raise BatchError(
            f"LatentSegment: row {row} has no stored latents at position {int(positions[row, column])}, stored are "
            f"{[int(value) for value in segment.positions[row]]}. Keep the whole trajectory."
        )
    device = segment.latents.device
    rows, slots = torch.arange(len(positions))[:, None], is_there.int().argmax(dim=2)
    sigma = segment.sigmas.to(device=device, dtype=torch.float32)[positions.to(device)]
    return segment.latents[rows.to(device), slots.to(device)].float(), sigma
