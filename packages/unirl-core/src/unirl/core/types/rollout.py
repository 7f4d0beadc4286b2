"""Rollouts: the tracks that engines give back, and the check that an engine used what its request said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from ..errors import BatchError, EchoMismatch
from ..names import shortened
from .batch import same
from .request import LatentRequest, Request, TextRequest
from .track import Status, Track

__all__ = ["Rollout", "verify_echo"]


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Tracks by name. Children name their parents, and every parent id must exist."""

    tracks: Mapping[str, Track]

    def __post_init__(self) -> None:
        for name, track in self.tracks.items():
            if track.name != name:
                raise BatchError(f"Rollout: the track under {name!r} calls itself {track.name!r}; names must agree.")
            if track.parent_track is None:
                continue
            parent = self.tracks.get(track.parent_track)
            if parent is None:
                raise BatchError(
                    f"Rollout: track {name!r} names the parent track {track.parent_track!r}; "
                    f"there are {sorted(self.tracks)}."
                )
            if track.parent_ids is None:
                raise BatchError(f"Rollout: track {name!r} descends from {track.parent_track!r} and has no parent_ids.")
            unknown = sorted(set(track.parent_ids) - set(parent.sample_ids))
            if unknown:
                raise BatchError(
                    f"Rollout: track {name!r} has parent ids that track {track.parent_track!r} lacks: {unknown[:3]}."
                )

    @property
    def num_samples(self) -> int:
        """Samples of a root track; all roots of a rollout have as many."""
        return next(track.num_rows for track in self.tracks.values() if track.parent_track is None)


def verify_echo(request: Request, track: Track) -> None:
    """Raise EchoMismatch when an engine did not use what the request said. track: its answer.

    Ids, sigmas, noise, SDE steps, kernel, guidance and dtype of latent tracks are compared bit for bit: an engine that
    rounds a sigma samples from another policy than the one that is trained. So are prompt tokens, temperature and
    options of text tracks; a text must end where the request says. The comparison is worth as much as the echo: an
    engine reads these values off the objects that computed, never off the request.
    """
    name, expected = request.track, request.params
    _compare(f"{name}.name", name, track.name)
    _compare(f"{name}.sample_ids", request.sample_ids, track.sample_ids)
    _compare(f"{name}.group_ids", request.group_ids, track.group_ids)
    _compare(f"{name}.policy_version", (request.policy_version,) * request.num_rows, track.policy_version)
    if isinstance(expected, TextRequest):
        _compare_text(name, expected, track)
    else:
        _compare_latent(name, expected, track)


def _compare_latent(name: str, wanted: LatentRequest, track: Track) -> None:
    segment = track.latent
    _compare(f"{name}.sigmas", wanted.sigmas, segment.sigmas)
    _compare(f"{name}.sde_steps", wanted.sde_steps, segment.sde_steps)
    _compare(f"{name}.train_steps", wanted.train_steps, segment.train_steps)
    _compare(f"{name}.step_noise_ids", wanted.step_noise_ids, segment.step_noise_ids)
    _check_kept(name, wanted, track)
    _compare(f"{name}.latents.dtype", wanted.sampling.trajectory_dtype, str(segment.latents.dtype).split(".")[-1])
    asked, used = (
        {**vars(one), "options": dict(one.options), "guidance_options": dict(one.guidance_options)}
        for one in (wanted.sampler, segment.sampler)
    )
    for what in asked:
        _compare(f"{name}.sampler.{what}", asked[what], used[what])
    echoed = segment.initial_noise or ("",) * len(wanted.initial_noise)
    for row, digest in enumerate(wanted.initial_noise):
        if digest:
            _compare(f"{name}.initial_noise of {track.sample_ids[row]!r}", digest, echoed[row])


def _check_kept(name: str, wanted: LatentRequest, track: Track) -> None:
    """Every position of `keep` must have come back."""
    keep, positions = (
        cast("list[list[int]]", cast(Any, one).tolist()) for one in (wanted.keep, track.latent.positions)
    )
    for sample, *rows in zip(track.sample_ids, keep, positions, strict=True):
        asked, there = map(set, rows)
        if missing := sorted(asked - there - {-1}):
            raise EchoMismatch(
                f"{name}.positions of {sample!r}: the request keeps {sorted(asked - {-1})}, and {missing} did not come "
                "back. Store these latents too, or lower the engine's capability in its spec."
            )


def _compare_text(name: str, wanted: TextRequest, track: Track) -> None:
    segment, longest = track.text, wanted.sampling.max_new_tokens
    _compare(f"{name}.temperature", wanted.sampling.temperature, segment.temperature)
    _compare(f"{name}.options", dict(wanted.options), dict(segment.options))
    _compare(f"{name}.prompt_tokens", wanted.prompt_tokens, segment.prompt_tokens)
    for sample, status, length in zip(track.sample_ids, track.status, segment.lengths, strict=True):
        if wanted.length is not None and (length, status) != (wanted.length, Status.COMPLETED):
            raise EchoMismatch(
                f"{name}.tokens of {sample!r}: got {length}, {status.name}, expected {wanted.length}, COMPLETED: the "
                "model fixes their number."
            )
        if length > longest:
            raise EchoMismatch(f"{name}.tokens of {sample!r}: got {length}, expected at most {longest}.")
        if status is Status.TRUNCATED and length < longest:
            raise EchoMismatch(
                f"{name}.status of {sample!r}: it is TRUNCATED with {length} of {longest} tokens. The engine has a "
                "shorter limit of its own, such as its context length; raise that one or lower max_new_tokens."
            )


def _compare(what: str, asked: Any, used: Any) -> None:
    if same(asked, used):
        return
    if all(isinstance(value, tuple) for value in (asked, used)):
        if len(asked) == len(used):
            row = next(i for i, (one, other) in enumerate(zip(asked, used, strict=True)) if not same(one, other))
            return _compare(f"{what}[{row}]", asked[row], used[row])
        asked, used = f"{len(asked)} rows", f"{len(used)} rows"
    one, other = (shortened(" ".join(repr(value).split()), 300) for value in (asked, used))
    raise EchoMismatch(
        f"{what}: the request says {one}, the engine used {other}. "
        "Rollout and training would differ; fix the engine or lower its capability in its spec."
    )
