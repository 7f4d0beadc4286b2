"""The samples of a step as files in the run folder: scored tracks with their advantages, for `unirl show`.

`samples/step-000010/<stage>.safetensors` has the samples that the stage trains on, or all of them if it does not train,
in the format of `unirl.core.types.serial`; `<stage>.left-out.safetensors` has those that the algorithm left out.
Latents, conditions, images and videos are not in them.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from unirl.core.disk import replace_bytes
from unirl.core.errors import BatchError, RunFolderError
from unirl.core.types.serial import from_bytes, to_bytes
from unirl.core.types.track import LatentSegment, Track

if TYPE_CHECKING:
    from unirl.core.types.rollout import Rollout

__all__ = ["SavedTrack", "read_samples", "remove_samples", "save_samples", "saved_steps"]

SAMPLES = "samples"
SUFFIX = ".safetensors"
LEFT_OUT = ".left-out"
PER_STEP = ("positions", "sde_steps", "train_steps", "log_probs", "values", "returns", "advantages")
"""Arrays of a latent segment that are saved; the others are latents, or means of the size of latents."""


@dataclass(frozen=True, kw_only=True)
class SavedTrack:
    """The samples of one stage in a step."""

    track: Track
    """Those that the stage trained on, or all of them if it did not train. Latents have no elements."""
    left_out: Track | None = None
    """Those that the algorithm left out of training, without advantages."""


def save_samples(folder: Path, rollout: Rollout, trained: Mapping[str, Track], *, step: int) -> None:
    """Write the samples of a step into a run folder, parents before their children.

    trained: stage -> its samples with their advantages, possibly fewer than in the rollout.  Raises DiskFull.
    """
    place = _folder(folder, step)
    place.mkdir(parents=True, exist_ok=True)
    for name, track in rollout.tracks.items():
        used = trained.get(name, track)
        known = set(used.sample_ids)
        rest = [row for row, sample in enumerate(track.sample_ids) if sample not in known]
        replace_bytes(place / f"{name}{SUFFIX}", to_bytes(_light(used)))
        if rest:
            replace_bytes(place / f"{name}{LEFT_OUT}{SUFFIX}", to_bytes(_light(track.select(rest))))


def saved_steps(folder: Path) -> list[int]:
    """Steps whose samples a run folder has, rising. Empty without any."""
    names = (re.fullmatch(r"step-(\d+)", path.name) for path in (folder / SAMPLES).glob("step-*"))
    return sorted(int(name[1]) for name in names if name)


def read_samples(folder: Path, step: int) -> dict[str, SavedTrack]:
    """Stage -> its samples in a step of a run folder.

    Raises RunFolderError for a file that is damaged, or that another version of UniRL wrote.
    """
    tracks: dict[str, Track] = {}
    for file in sorted(_folder(folder, step).glob(f"*{SUFFIX}")):
        try:
            tracks[file.name.removesuffix(SUFFIX)] = from_bytes(file.read_bytes(), Track)
        except (BatchError, OSError) as error:
            raise RunFolderError(f"{file}: these samples cannot be read: {error}") from error
    return {
        name: SavedTrack(track=track, left_out=tracks.get(name + LEFT_OUT))
        for name, track in tracks.items()
        if not name.endswith(LEFT_OUT)
    }


def remove_samples(folder: Path, *, start: int) -> None:
    """Remove the samples of `start` and later steps, which a resumed run makes again."""
    for step in saved_steps(folder):
        if step >= start:
            shutil.rmtree(_folder(folder, step))


def _folder(folder: Path, step: int) -> Path:
    return folder / SAMPLES / f"step-{step:06d}"


def _light(track: Track) -> Track:
    """The track without what is large, all of it in this process."""
    segment = track.segment
    if isinstance(segment, LatentSegment):
        import torch

        # With a launcher, those of long schedules lie in other processes.
        arrays = {name: None if (array := getattr(segment, name)) is None else array.cpu() for name in PER_STEP}
        latents = torch.zeros(track.num_rows, segment.positions.shape[1], 0)
        segment = replace(segment, latents=latents, means=None, reference_means=None, **arrays)
    media = track.media if track.media is not None and track.media.kind == "text" else None
    return replace(track, segment=segment, media=media, conditions={})
