"""Rows of a rollout, each for itself as an engine's requests give them, joined into what a request of many rows is
answered with.

Runs in the environments of engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from unirl.core.request import Request
from unirl.core.rollout import Rollout
from unirl.core.serial import to_bytes
from unirl.core.track import Conditions
from unirl.numerics.denoise import Trajectory
from unirl.numerics.latent_rollout import LatentRollout, latent_track

__all__ = ["joined", "rows_of"]

USED = ("sample_id", "prompt", "negative_prompt", "guidance_scale", "version")
"""What a row says of itself besides its tensors."""


def rows_of(
    request: Request,
    *,
    found: LatentRollout,
    conditions: Mapping[str, Conditions],
    media: Tensor | None,
    prompts: Sequence[str],
    negative_prompt: str | None,
    guidance_scale: float,
    version: int,
) -> list[dict[str, Any]]:
    """What was made of each row of a batch, on the CPU.

    request: the batch's rows.  conditions, prompts, negative_prompt, guidance_scale: as they were computed with;
    negative_prompt is None without guidance.  version: of the weights that were computed with.
    """
    path = found.trajectory
    rows: list[dict[str, Any]] = []
    sent: set[str] = set()
    for row, (sample, prompt) in enumerate(zip(request.sample_ids, prompts, strict=True)):
        rows.append(
            {
                "sample_id": sample,
                "prompt": prompt,
                "negative_prompt": negative_prompt,
                "guidance_scale": guidance_scale,
                "version": version,
                "initial_noise": found.initial_noise[row],
                "rows": request.num_rows,
                "latents": _row(path.latents, row),
                "positions": _row(path.positions, row),
                "sde_steps": _row(path.sde_steps, row),
                "log_probs": None if path.log_probs is None else _row(path.log_probs, row),
                "final": _row(path.final, row),
                "media": None if media is None else _row(media, row),
                "sigmas": path.sigmas.cpu(),
                # Once for each prompt of the batch: samples of a group share theirs.
                "conditions": {} if prompt in sent else {kind: _values(own, row) for kind, own in conditions.items()},
            }
        )
        sent.add(prompt)
    return rows


def joined(request: Request, rows: Sequence[Mapping[str, Any]]) -> tuple[Any, Mapping[str, Tensor]]:
    """The answer to a request: what each row was made from, and its rollout as bytes.

    rows: in the order of the request. That each is the one that was asked for is the caller's to compare.
    """
    (track,) = request.tracks
    for row in rows:
        if not torch.equal(row["sigmas"], rows[0]["sigmas"]):
            raise RuntimeError(f"sample {row['sample_id']!r} was made with other sigmas than {rows[0]['sample_id']!r}.")
    parts = [_rollout(row) for row in rows]
    media = [row["media"] for row in rows if row["media"] is not None]
    found = latent_track(
        request,
        track,
        sampled=LatentRollout.concat(parts),
        conditions=_conditions(rows),
        media=torch.cat(media) if media else None,
        version=0,
    )
    data = to_bytes(Rollout(tracks={track: found}))
    used = {name: [row[name] for row in rows] for name in USED}
    batches = [row["rows"] for row in rows]
    return {**used, "batches": batches}, {"rollout": torch.frombuffer(bytearray(data), dtype=torch.uint8)}


def _rollout(row: Mapping[str, Any]) -> LatentRollout:
    trajectory = Trajectory(
        latents=row["latents"],
        positions=row["positions"],
        sigmas=row["sigmas"],
        sde_steps=row["sde_steps"],
        log_probs=row["log_probs"],
        means=None,
        final=row["final"],
    )
    return LatentRollout(trajectory=trajectory, initial_noise=(row["initial_noise"],))


def _conditions(rows: Sequence[Mapping[str, Any]]) -> dict[str, Conditions]:
    """Once for each prompt. Every batch brings those of its prompts, the same wherever they were computed."""
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
    found: dict[str, Conditions] = {}
    for kind, named in values.items():
        if kind == "negative":
            # One prompt for all.
            whole = Conditions(values={name: each[0] for name, each in named.items()}, index=torch.zeros_like(index))
        else:
            whole = Conditions(values={name: torch.cat(each) for name, each in named.items()}, index=index)
        found[kind] = whole
    return found


def _row(values: Tensor, row: int) -> Tensor:
    """A copy, so that a row does not keep the memory of all."""
    return values[row : row + 1].to("cpu", copy=True)


def _values(conditions: Conditions, row: int) -> dict[str, Tensor]:
    at = int(conditions.index[row])
    return {name: _row(value, at) for name, value in conditions.values.items()}
