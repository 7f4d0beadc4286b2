"""A track and a model for losses over the forward process: given velocities, at points that a test chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor
from unirl.core.roles import Forward, Policy
from unirl.core.types.inputs import Inputs
from unirl.core.types.track import LatentSegment, Sampler, Status, Track

__all__ = ["Velocities", "at_points", "clean_track"]


def clean_track(clean: Tensor, *, advantages: Sequence[float] | None = None, texts: Sequence[str] = ()) -> Track:
    """Samples of one group with these clean latents [n, ...], and a schedule of levels 1, 0.5, 0."""
    rows = len(clean)
    segment = LatentSegment(
        latents=clean[:, None],
        positions=torch.full((rows, 1), 2),
        sde_steps=torch.zeros(rows, 0, dtype=torch.int64),
        sigmas=torch.tensor([1.0, 0.5, 0.0]),
        sampler=Sampler(kernel="euler", eta=0.0),
    )
    return Track(
        name="image",
        sample_ids=tuple(f"r0/p/{row}" for row in range(rows)),
        group_ids=("r0/p",) * rows,
        inputs=Inputs.of_texts(tuple(texts) or ("",) * rows),
        metadata=({},) * rows,
        segment=segment,
        advantages=None if advantages is None else torch.tensor(advantages),
        sample_weights=torch.ones(rows),
        status=(Status.COMPLETED,) * rows,
        policy_version=(0,) * rows,
    )


class Velocities(Forward):  # type: ignore[misc]  # replays and decodes nothing
    """Given velocities [n, k, ...] of each policy, or one for all points, in place of a model; notes what was asked."""

    def __init__(self, by_policy: Mapping[Policy, Tensor]) -> None:
        self.by_policy = by_policy
        self.asked: list[tuple[Policy, Tensor, Tensor]] = []

    def velocity(
        self, track: Track, x: Tensor, sigma: Tensor, *, policy: Policy = "live", guided: bool = False
    ) -> Tensor:
        assert not guided
        self.asked.append((policy, x, sigma))
        return self.by_policy[policy].expand(x.shape)


def at_points(monkeypatch: pytest.MonkeyPatch, *, noise: Tensor, sigma: Tensor) -> None:
    """Points of the forward process are these: noise [n, k, ...], or broadcast to it, and levels [n, k]."""
    module = "unirl.numerics.forward_process"
    monkeypatch.setattr(f"{module}.forward_noise", lambda **_: noise)
    monkeypatch.setattr(f"{module}.forward_sigmas", lambda **_: sigma)
