"""Rows of a track, one per request of a serving engine, and joined into the answer to a request of many rows.

Runs in the environments of engines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from unirl.core.types.array import Ragged
from unirl.core.types.batch import join
from unirl.core.types.inputs import distinct
from unirl.core.types.request import Request
from unirl.core.types.serial import to_bytes
from unirl.core.types.track import Conditions, LatentSegment, Sampler
from unirl.numerics.diffusion.rollout import branch_inputs, latent_track

__all__ = ["joined", "rows_of"]

USED = ("sample_id", "text", "negative_prompt", "sources", "version")
"""Inputs of each row that the host compares with the request; everything else is in the track."""


def rows_of(
    request: Request,
    *,
    segment: LatentSegment,
    conditions: Mapping[str, Conditions],
    media: Tensor | None,
    texts: Sequence[str],
    negative_prompt: str | None,
    sources: Mapping[str, Sequence[Sequence[str]]],
    version: int,
) -> list[dict[str, Any]]:
    """The track of each row of a batch, as plain values on the CPU.

    request: the batch's rows.  conditions, texts, negative_prompt: as used; negative_prompt is None without
    guidance.  sources: for each branch of the guidance and each row what was encoded besides the text, see
    `unirl.engine_host.received_media.echoed`.  version: of the weights used.
    """
    assert segment.initial_noise is not None
    # Plain values: rows are sent in the engine's own messages.
    sampler = dataclasses.asdict(segment.sampler)
    rows: list[dict[str, Any]] = []
    firsts, _ = distinct(request.inputs)
    for row, (sample, text) in enumerate(zip(request.sample_ids, texts, strict=True)):
        rows.append(
            {
                "sample_id": sample,
                "text": text,
                "negative_prompt": negative_prompt,
                "sources": {branch: list(own[row]) for branch, own in sources.items()},
                "sampler": sampler,
                "version": version,
                "initial_noise": segment.initial_noise[row],
                "step_noise_ids": None if segment.step_noise_ids is None else segment.step_noise_ids[row],
                "rows": request.num_rows,
                "latents": _row(segment.latents, row),
                "positions": _row(segment.positions, row),
                "sde_steps": _row(segment.sde_steps, row),
                "train_steps": None if segment.train_steps is None else _row(segment.train_steps, row),
                "log_probs": None if segment.log_probs is None else _row(segment.log_probs, row),
                "media": None if media is None else _row(media, row),
                "sigmas": segment.sigmas,
                # Once per input of the batch: samples of a group share it.
                "conditions": {kind: _values(own, row) for kind, own in conditions.items()} if row in firsts else {},
            }
        )
    return rows


def joined(request: Request, rows: Sequence[Mapping[str, Any]]) -> tuple[Any, Mapping[str, Tensor]]:
    """The answer to a request: the inputs of each row, and the track as bytes.

    rows: in the order of the request; the caller checks that each is the requested one.
    Raises BatchError for rows with different sigmas or samplers.
    """
    media = [row["media"] for row in rows if row["media"] is not None]
    track = latent_track(
        request,
        segment=LatentSegment.concat([_segment(row) for row in rows]),
        conditions=_conditions(request, rows),
        media=torch.cat(media) if media else None,
        policy_version=[row["version"] for row in rows],
    )
    used = {name: [row[name] for row in rows] for name in USED}
    batches = [row["rows"] for row in rows]
    return {**used, "batches": batches}, {"track": torch.frombuffer(bytearray(to_bytes(track)), dtype=torch.uint8)}


def _segment(row: Mapping[str, Any]) -> LatentSegment:
    sampler: dict[str, Any] = dict(row["sampler"])
    for key in ("options", "guidance_options"):
        sampler[key] = tuple((name, value) for name, value in sampler[key])
    return LatentSegment(
        latents=row["latents"],
        positions=row["positions"],
        sde_steps=row["sde_steps"],
        train_steps=row["train_steps"],
        log_probs=row["log_probs"],
        sigmas=row["sigmas"],
        sampler=Sampler(**sampler),
        initial_noise=(row["initial_noise"],),
        step_noise_ids=None if row["step_noise_ids"] is None else (tuple(row["step_noise_ids"]),),
    )


def _conditions(request: Request, rows: Sequence[Mapping[str, Any]]) -> dict[str, Conditions]:
    """Once per input. Every batch brings those of its inputs; they are the same in each. A branch that no row brings is
    left out."""
    result: dict[str, Conditions] = {}
    for branch, inputs in branch_inputs(request).items():
        firsts, index = distinct(inputs)
        held = [
            (at, row["conditions"][branch]) for at, row in zip(index, rows, strict=True) if branch in row["conditions"]
        ]
        own = dict(reversed(held))
        if own:
            values = {name: join(name, [own[at][name] for at in range(len(firsts))]) for name in own[0]}
            result[branch] = Conditions(values=values, index=torch.tensor(index, dtype=torch.int64))
    return result


def _row(values: Tensor, row: int) -> Tensor:
    """A copy, so that one row does not keep all rows in memory."""
    return values[row : row + 1].to("cpu", copy=True)


def _values(conditions: Conditions, row: int) -> dict[str, Ragged]:
    at = int(conditions.index[row])
    return {
        name: (value[at].to("cpu", copy=True),) if isinstance(value, tuple) else _row(value, at)
        for name, value in conditions.values.items()
    }
