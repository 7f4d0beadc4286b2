"""Rows of a track, one per request of a serving engine, and joined into the answer to a request of many rows.

Runs in the environments of engines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from unirl.core.types.request import Request
from unirl.core.types.serial import to_bytes
from unirl.core.types.track import Conditions, LatentSegment, Sampler
from unirl.numerics.diffusion.rollout import latent_track

__all__ = ["joined", "rows_of"]

USED = ("sample_id", "prompt", "negative_prompt", "version")
"""Inputs of each row that the host compares with the request; everything else is in the track."""


def rows_of(
    request: Request,
    *,
    segment: LatentSegment,
    conditions: Mapping[str, Conditions],
    media: Tensor | None,
    prompts: Sequence[str],
    negative_prompt: str | None,
    version: int,
) -> list[dict[str, Any]]:
    """The track of each row of a batch, as plain values on the CPU.

    request: the batch's rows.  conditions, prompts, negative_prompt: as used; negative_prompt is None without
    guidance.  version: of the weights used.
    """
    assert segment.initial_noise is not None
    # Plain values: rows are sent in the engine's own messages.
    sampler = dataclasses.asdict(segment.sampler)
    rows: list[dict[str, Any]] = []
    sent: set[str] = set()
    for row, (sample, prompt) in enumerate(zip(request.sample_ids, prompts, strict=True)):
        rows.append(
            {
                "sample_id": sample,
                "prompt": prompt,
                "negative_prompt": negative_prompt,
                "sampler": sampler,
                "version": version,
                "initial_noise": segment.initial_noise[row],
                "rows": request.num_rows,
                "latents": _row(segment.latents, row),
                "positions": _row(segment.positions, row),
                "sde_steps": _row(segment.sde_steps, row),
                "train_steps": None if segment.train_steps is None else _row(segment.train_steps, row),
                "log_probs": None if segment.log_probs is None else _row(segment.log_probs, row),
                "media": None if media is None else _row(media, row),
                "sigmas": segment.sigmas,
                # Once per prompt of the batch: samples of a group share it.
                "conditions": {} if prompt in sent else {kind: _values(own, row) for kind, own in conditions.items()},
            }
        )
        sent.add(prompt)
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
        conditions=_conditions(rows),
        media=torch.cat(media) if media else None,
        policy_version=[row["version"] for row in rows],
    )
    used = {name: [row[name] for row in rows] for name in USED}
    batches = [row["rows"] for row in rows]
    return {**used, "batches": batches}, {"track": torch.frombuffer(bytearray(to_bytes(track)), dtype=torch.uint8)}


def _segment(row: Mapping[str, Any]) -> LatentSegment:
    sampler: dict[str, Any] = dict(row["sampler"])
    sampler["options"] = tuple((name, value) for name, value in sampler["options"])
    return LatentSegment(
        latents=row["latents"],
        positions=row["positions"],
        sde_steps=row["sde_steps"],
        train_steps=row["train_steps"],
        log_probs=row["log_probs"],
        sigmas=row["sigmas"],
        sampler=Sampler(**sampler),
        initial_noise=(row["initial_noise"],),
    )


def _conditions(rows: Sequence[Mapping[str, Any]]) -> dict[str, Conditions]:
    """Once per prompt. Every batch brings those of its prompts; they are the same in each."""
    prompts: dict[str, int] = {}
    values: dict[str, dict[str, list[Tensor]]] = {}
    for row in rows:
        if row["prompt"] in prompts or not row["conditions"]:
            continue
        prompts[row["prompt"]] = len(prompts)
        for kind, named in row["conditions"].items():
            for name, value in named.items():
                values.setdefault(kind, {}).setdefault(name, []).append(value)
    index = torch.tensor([prompts[row["prompt"]] for row in rows], dtype=torch.int64)
    result: dict[str, Conditions] = {}
    for kind, named in values.items():
        if kind == "negative":
            # One prompt for all rows.
            whole = Conditions(values={name: each[0] for name, each in named.items()}, index=torch.zeros_like(index))
        else:
            whole = Conditions(values={name: torch.cat(each) for name, each in named.items()}, index=index)
        result[kind] = whole
    return result


def _row(values: Tensor, row: int) -> Tensor:
    """A copy, so that one row does not keep all rows in memory."""
    return values[row : row + 1].to("cpu", copy=True)


def _values(conditions: Conditions, row: int) -> dict[str, Tensor]:
    at = int(conditions.index[row])
    return {name: _row(value, at) for name, value in conditions.values.items()}
