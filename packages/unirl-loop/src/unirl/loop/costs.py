"""Cost of a step, by formula: denoiser forwards and stored bytes, the split between phases, and the rates reached."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from unirl.core.types.request import LatentRequest
from unirl.core.types.sampling import TRAJECTORY_BYTES
from unirl.core.types.track import Track

__all__ = ["Speed", "StepCost", "latent_step_cost", "peak_tflops_of", "track_bytes"]

BACKWARD = 2
"""A backward pass costs about two forwards."""

PEAK_TFLOPS: Mapping[str, float] = {
    # HGX B200 data sheet: 4500 with sparsity.
    r"B200": 2250.0,
    # H100 data sheet: 1979, 1671 and 1513 with sparsity. H800 and GH200 data sheets: as H100 SXM.
    r"H100 80GB HBM3|H800|GH200.*": 989.0,
    r"H100 NVL": 835.0,
    r"H100 PCIe": 756.0,
    # H200 data sheet: 1979 and 1671 with sparsity.
    r"H200": 989.0,
    r"H200 NVL": 835.0,
    # A100 data sheet; A800 data sheet: the same.
    r"A100[- ].*|A800[- ].*": 312.0,
    # L40S and L40 data sheets.
    r"L40S": 362.0,
    r"L40": 181.0,
    # L4 data sheet: 242 with sparsity.
    r"L4": 121.0,
    # A10 data sheet.
    r"A10": 125.0,
    # NVIDIA Ada GPU architecture, table 2: bf16 with fp32 accumulate.
    r"GeForce RTX 4090": 165.2,
    # NVIDIA Ampere GA102 GPU architecture, table 2: bf16 with fp32 accumulate.
    r"GeForce RTX 3090": 71.0,
}
"""Name of a device without its maker, as CUDA gives it, -> published dense bf16 peak in TFLOP/s."""


def peak_tflops_of(device: str) -> float | None:
    """Published dense bf16 peak of a device by its name, in TFLOP/s; None for one that is not known, and for a share of
    one (MIG)."""
    name = device.removeprefix("NVIDIA ").strip()
    return next(
        (peak for pattern, peak in PEAK_TFLOPS.items() if re.fullmatch(pattern, name) and "MIG" not in name), None
    )


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Operations of a step, for the rates of its phases."""

    flops: Mapping[str, float]
    """Phase -> predicted operations of each device in a step."""
    peak_tflops: float | None = None
    """Dense bf16 peak of a device; None where it is not known."""

    def metrics(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """`perf/<phase>_tflops` of each device, and with a peak `perf/<phase>_mfu`, the share of it, for phases that
        took any time. seconds: by phase."""
        result: dict[str, float] = {}
        for phase, flops in self.flops.items():
            if flops and seconds.get(phase):
                rate = flops / seconds[phase] / 1e12
                result[f"perf/{phase}_tflops"] = rate
                if self.peak_tflops is not None:
                    result[f"perf/{phase}_mfu"] = rate / self.peak_tflops
        return result


def track_bytes(tracks: Iterable[Track]) -> dict[str, float]:
    """`perf/media_bytes` and `perf/conditions_bytes`: arrays of a rollout that move to what scores and trains."""
    media = conditions = 0
    for track in tracks:
        if track.media is not None and track.media.kind != "text":
            media += _array_bytes(track.media.values)
        conditions += sum(_array_bytes(value) for one in track.conditions.values() for value in one.values.values())
    return {
        name: float(size) for name, size in (("perf/media_bytes", media), ("perf/conditions_bytes", conditions)) if size
    }


def _array_bytes(arrays: Any) -> int:
    """Bytes of an array, also one that is stored elsewhere, or of several."""
    if isinstance(arrays, tuple):
        return sum(map(_array_bytes, arrays))
    return prod(arrays.shape) * arrays.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Counts are exact, in rows (one row = one sample through the denoiser once); the split is their ratio."""

    rollout_rows: int
    old_log_prob_rows: int
    train_rows: int
    stored_bytes: int

    @property
    def generate_share(self) -> float:
        """Predicted share of generation in generation plus training."""
        training = self.old_log_prob_rows + self.train_rows * (1 + BACKWARD)
        return self.rollout_rows / max(1, self.rollout_rows + training)


def latent_step_cost(
    request: LatentRequest,
    *,
    latent_shape: Sequence[int],
    replayed_share: float,
    further: Sequence[LatentRequest] = (),
) -> StepCost:
    """Cost of one step on a latent track.

    further: requests of samples that are drawn and not trained on; their rows count in the rollout.
    Rollout: N*T rows for each branch of the guidance, an upper bound where an engine shares the paths of a tree.
    Training: every scored step once forward and backward; this share of them once more forward, for old log-probs.
    Stored: positions {i, i+1 for scored step i}, T and `keep`, in `sampling.trajectory_dtype`.
    """
    branches = request.num_branches
    scored_rows = int((request.scored_steps >= 0).sum())
    steps, positions = int(request.sigmas.shape[0]) - 1, 0
    for row, keep in zip(request.scored_steps, request.keep, strict=True):
        chosen = {int(step) for step in row} - {-1}
        kept = {int(position) for position in keep} - {-1}
        positions += len(chosen | {step + 1 for step in chosen} | {steps} | kept)
    return StepCost(
        rollout_rows=sum(map(_rollout_rows, [request, *further])),
        old_log_prob_rows=round(scored_rows * branches * replayed_share),
        train_rows=scored_rows * branches,
        stored_bytes=positions * prod(latent_shape) * TRAJECTORY_BYTES[request.sampling.trajectory_dtype],
    )


def _rollout_rows(request: LatentRequest) -> int:
    return request.num_rows * (int(request.sigmas.shape[0]) - 1) * request.num_branches
