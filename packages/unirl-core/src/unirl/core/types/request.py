"""Requests: everything that decides what an engine generates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import BatchError
from .array import Array
from .batch import Batch, rows, shared
from .track import Sampler

if TYPE_CHECKING:
    from .inputs import Inputs
    from .media import MediaKind
    from .sampling import LatentSamplingConfig, TextSamplingConfig

__all__ = ["LatentRequest", "Request", "TextRequest"]

T = TypeVar("T", bound=Batch)


@dataclass(frozen=True, kw_only=True)
class LatentRequest(Batch):
    """How one latent track is sampled."""

    sampling: LatentSamplingConfig = shared()
    """Its `kernel_options` and `guidance_options` name every option, also those at their defaults."""
    sigmas: Array = shared()
    """[T+1] fp32, falling, ending in 0. The single source of truth: engines use these and echo them."""
    sde_steps: Array = rows()
    """[N, S] int64, rising, -1 is none; samples of one group share theirs."""
    train_steps: Array | None = rows(default=None)
    """[N, R] int64, rising, -1 is none: the SDE steps of each sample that are trained on; None trains on all."""
    noise_ids: tuple[str, ...] = rows()
    """Key of each sample's initial noise: its own id, or its group's if the group shares the noise."""
    initial_noise: tuple[str, ...] = rows()
    """Digest of the x_T that a sample must start from; "" where it is not checked (one row of a request is enough)."""
    keep: Array = rows()
    """[N, P] int64, -1 is none: positions whose latents come back besides those around the scored steps and the end."""
    step_noise_ids: tuple[tuple[str, ...], ...] | None = rows(default=None)
    """[N] of T keys: that of each step's noise, where samples of a group share noise; None takes the sample's id at
    every step. Rows of equal input, initial noise, SDE steps and keys of these up to a step are equal there."""
    num_branches: int = shared(default=1)
    """Branches of the guidance: velocities that a step takes of each row."""

    def __post_init__(self) -> None:
        self._check_rows()

    @property
    def num_rows(self) -> int:
        return len(self.noise_ids)

    @property
    def scored_steps(self) -> Array:
        """[N, R] int64, the steps that are scored and trained on: `train_steps`, or all SDE steps."""
        return self.sde_steps if self.train_steps is None else self.train_steps

    @property
    def sampler(self) -> Sampler:
        """Kernel and guidance that `sampling` asks for, as an echo has them."""
        sampling = self.sampling
        return Sampler(
            kernel=sampling.kernel,
            eta=float(sampling.eta),
            options=tuple(sorted(sampling.kernel_options.items())),
            guidance_scale=float(sampling.guidance_scale),
            guidance_mode=sampling.guidance_mode,
            guidance_options=tuple(sorted(sampling.guidance_options.items())),
        )


@dataclass(frozen=True, kw_only=True)
class TextRequest(Batch):
    """How one text track is sampled."""

    sampling: TextSamplingConfig = shared()
    """Its `options` name every option that the track has, also those at their defaults."""
    prompt_tokens: tuple[Array, ...] = rows()
    """Per sample [P_n] int64: prompt token ids, chat template included. Engines take these instead of text."""
    stop_tokens: tuple[int, ...] = shared()
    """Stop token ids."""
    seeds: tuple[int, ...] = rows()
    """Seed of each sample, 63 bits: an engine that uses it returns the same completion whatever else it generates."""
    options: tuple[tuple[str, Any], ...] = shared(default=())
    """Every option that the model's logits depend on, by name, also those at their defaults; see
    `ModelSpec.token_options`. `next_logits` takes them where there are any."""
    length: int | None = shared(default=None)
    """Tokens of every completion, where the model fixes it: it is COMPLETED there, and nothing stops it before."""

    def __post_init__(self) -> None:
        self._check_rows()

    @property
    def num_rows(self) -> int:
        return len(self.prompt_tokens)


@dataclass(frozen=True, kw_only=True)
class Request(Batch):
    """Samples of one track to generate. Noise is a pure function of (seed, rollout, id, step), so any split of it gives
    the same."""

    track: str = shared()
    """Name of the track."""
    sample_ids: tuple[str, ...] = rows()
    group_ids: tuple[str, ...] = rows()
    inputs: Inputs = rows()
    """Inputs of the samples."""
    metadata: tuple[Mapping[str, Any], ...] = rows()
    params: LatentRequest | TextRequest = rows()
    """How the track is sampled."""
    seed: int = shared()
    rollout: int = shared()
    """Number of this rollout in the run; part of the noise key."""
    policy_version: int = shared()
    """Policy version that must generate the samples."""
    medium: MediaKind | None = shared(default=None)
    """What the samples become; None is text for a text track, and images or videos, as the model decodes, otherwise."""

    def __post_init__(self) -> None:
        self._check_rows()

    @property
    def num_rows(self) -> int:
        return len(self.sample_ids)

    @property
    def latent(self) -> LatentRequest:
        """How a latent track is sampled. Raises BatchError for any other."""
        return self._params(LatentRequest)

    @property
    def text(self) -> TextRequest:
        """How a text track is sampled. Raises BatchError for any other."""
        return self._params(TextRequest)

    def _params(self, kind: type[T]) -> T:
        if not isinstance(self.params, kind):
            raise BatchError(
                f"Request.params of track {self.track!r}: got a {type(self.params).__name__}, expected a "
                f"{kind.__name__}."
            )
        return self.params
