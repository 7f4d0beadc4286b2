"""Requests: everything that decides what an engine generates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from .array import Array
from .batch import Batch, rows, shared
from .errors import BatchError

if TYPE_CHECKING:
    from .config import LatentSamplingConfig, TextSamplingConfig
    from .data import MediaRef

__all__ = ["LatentRequest", "Request", "TextRequest"]

T = TypeVar("T", bound=Batch)


@dataclass(frozen=True, kw_only=True)
class LatentRequest(Batch):
    """How one latent track is sampled."""

    sampling: LatentSamplingConfig = shared()
    sigmas: Array = shared()
    """[T+1] fp32, falling, ending in 0. The single source of truth: engines use these and echo them."""
    sde_steps: Array = rows()
    """[N, S] int64, rising, -1 is none; samples of one group share theirs."""
    noise_ids: tuple[str, ...] = rows()
    """Id that keys the initial noise of each sample: its own, or its group's when the group shares it."""
    initial_noise: tuple[str, ...] = rows()
    """Digest of the x_T that a sample must start from; "" where it is not checked (one row of a request is enough)."""
    trajectory: Literal["window", "full"] = shared(default="window")
    """Which latents come back: those around the SDE steps and the end, or those of every step."""

    def __post_init__(self) -> None:
        self._check_rows()

    @property
    def num_rows(self) -> int:
        return len(self.noise_ids)


@dataclass(frozen=True, kw_only=True)
class TextRequest(Batch):
    """How one text track is sampled."""

    sampling: TextSamplingConfig = shared()
    prompt_tokens: tuple[Array, ...] = rows()
    """Per sample [P_n] int64: what the model goes on from, chat template included. Engines take these and no text."""
    stop_tokens: tuple[int, ...] = shared()
    """Tokens that end a text."""
    seeds: tuple[int, ...] = rows()
    """Seed of each sample, 63 bits: an engine that draws from it gives the same text whatever else it generates."""

    def __post_init__(self) -> None:
        self._check_rows()

    @property
    def num_rows(self) -> int:
        return len(self.prompt_tokens)


@dataclass(frozen=True, kw_only=True)
class Request(Batch):
    """Samples to generate. Noise is a pure function of (seed, rollout, id, step), so any split of it gives the same."""

    sample_ids: tuple[str, ...] = rows()
    group_ids: tuple[str, ...] = rows()
    prompt_ids: tuple[str, ...] = rows()
    prompts: tuple[str, ...] = rows()
    metadata: tuple[Mapping[str, Any], ...] = rows()
    media: tuple[tuple[MediaRef, ...], ...] = rows()
    tracks: Mapping[str, LatentRequest | TextRequest] = rows()
    """Track name -> how it is sampled."""
    seed: int = shared()
    rollout: int = shared()
    """Number of this rollout in the run; part of the noise key."""
    policy_version: int = shared()
    """Version that the samples are to be made with."""

    def __post_init__(self) -> None:
        self._check_rows()

    @property
    def num_rows(self) -> int:
        return len(self.sample_ids)

    def latent(self, track: str) -> LatentRequest:
        """How a latent track is sampled. Raises BatchError for any other."""
        return self._of(track, LatentRequest)

    def text(self, track: str) -> TextRequest:
        """How a text track is sampled. Raises BatchError for any other."""
        return self._of(track, TextRequest)

    def _of(self, track: str, kind: type[T]) -> T:
        found = self.tracks.get(track)
        if not isinstance(found, kind):
            raise BatchError(
                f"Request: a {kind.__name__} for track {track!r} was asked for; there "
                f"{'is none' if found is None else f'is a {type(found).__name__}'} (tracks: {sorted(self.tracks)})."
            )
        return found
