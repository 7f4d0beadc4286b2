"""Log-prob mismatch between the engine and the model being trained: the measure of the promise "ratio 1"."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from unirl.core.errors import RunFailed
from unirl.core.roles import Forward, Metric
from unirl.core.types.track import LatentSegment, TextSegment, Track

from ..tokens.replay import per_token

if TYPE_CHECKING:
    from unirl.core.roles import Job, Model, Policy, Replayed, ReplayedTokens
    from unirl.core.specs.config import TrainConfig

    from ..loss.tally import Reducer

__all__ = ["MeteredForward", "MismatchMeter", "metered"]


class MismatchMeter:
    """Measures the mismatch between the engine's log-probs and the recomputed ones."""

    def __init__(self, *, version: int | None = None) -> None:
        """version: of the weights being trained; samples of older weights also differ by training and are skipped.
        None measures all samples."""
        self._version = version
        self.was_called = False
        """Whether the live weights were replayed."""
        self._largest, self._total, self._count = 0.0, 0.0, 0.0
        self._unread: list[torch.Tensor] = []
        """[3] fp64 of each replay: the largest mismatch, the sum, and the number of them."""

    def observe(self, track: Track, replayed: Replayed | ReplayedTokens) -> None:
        """Measure one replay of the track by the live weights."""
        self.was_called = True
        engine = _engine_log_probs(track)
        if engine is None:
            return
        rows = track.sample_weights > 0
        if self._version is not None and any(made != self._version for made in track.policy_version):
            rows = rows & rows.new_tensor([made == self._version for made in track.policy_version])
        counts = replayed.valid & rows[:, None]
        if not counts.numel():
            return
        gap = (engine - replayed.log_probs.detach()).abs().double()
        # A NaN mismatch counts as infinite, which every bound rejects.
        gap = torch.where(counts, torch.nan_to_num(gap, nan=math.inf, posinf=math.inf), 0.0)
        self._unread.append(torch.stack([gap.max(), gap.sum(), counts.sum().double()]))

    def metrics(self) -> dict[str, Metric]:
        """Mismatch over everything replayed so far. A weight of 0 means that there was nothing to measure."""
        self._read()
        return {
            "logp_mismatch_max": Metric(total=self._largest, weight=self._count, reduce="max"),
            "logp_mismatch_mean": Metric(total=self._total, weight=self._count),
        }

    def _read(self) -> None:
        """Add what was measured since the last time, in one transfer."""
        if self._unread:
            together = cast("Any", torch.stack(self._unread))
            for largest, total, count in cast("list[list[float]]", together.tolist()):
                self._largest = max(self._largest, largest)
                self._total += total
                self._count += count
            self._unread = []

    def check(self, train: TrainConfig, ranks: Reducer) -> None:
        """Raise RunFailed on every rank when the largest or the mean mismatch over all ranks is beyond its bound."""
        self._read()
        if train.logp_mismatch_max is not None:
            largest = float(ranks.all_reduce_max(torch.tensor([self._largest], dtype=torch.float64))[0])
            if largest > train.logp_mismatch_max:
                raise _too_far("train.logp_mismatch_max", f"by up to {largest:.3g}", train.logp_mismatch_max)
        if train.logp_mismatch_mean is not None:
            summed = ranks.all_reduce_sum(torch.tensor([self._total, self._count], dtype=torch.float64))
            total, count = float(summed[0]), float(summed[1])
            if count and total / count > train.logp_mismatch_mean:
                bound = train.logp_mismatch_mean
                raise _too_far("train.logp_mismatch_mean", f"by {total / count:.3g} on average", bound)


class MeteredForward(Forward, Protocol):
    """A `Forward` that shows every replay by the live weights to its meter, and asks its teachers for the reference
    policy, if it has them; with a guidance of that policy's own, if it has one. `trains` is the policy that has a
    gradient."""

    trains: Policy
    meter: MismatchMeter | None
    teachers: Mapping[str, Model]
    reference_guidance: float | None


@contextmanager
def metered(
    forward: MeteredForward, meter: MismatchMeter | None, *, job: Job, trains: Policy = "live"
) -> Generator[None]:
    """Within the block, `meter` measures what `forward` replays, its reference policy is that of the job, and the
    policy `trains` has a gradient."""
    forward.meter, forward.teachers, forward.reference_guidance = meter, job.references, job.reference_guidance
    forward.trains = trains
    try:
        yield
    finally:
        forward.meter = forward.reference_guidance = None
        forward.teachers = {}
        forward.trains = "live"


def _too_far(key: str, how: str, bound: float) -> RunFailed:
    return RunFailed(
        f"{key}: the engine's log-probs are off {how} from those of the trained model; {bound:.3g} is allowed. Its "
        "weights or its arithmetic differ: check the weight sync and the engine's dtype, or raise the bound."
    )


def _engine_log_probs(track: Track) -> torch.Tensor | None:
    """[n, S] as replay gives them, or None where the engine gave none."""
    segment = track.segment
    if isinstance(segment, TextSegment):
        return None if segment.log_probs is None else per_token(segment, "log_probs")
    return segment.log_probs if isinstance(segment, LatentSegment) else None
