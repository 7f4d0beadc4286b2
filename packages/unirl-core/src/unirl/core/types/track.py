"""Tracks: the samples of one stage of a rollout, with their lineage, generated segment, rewards and status."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Self, cast

from ..errors import BatchError
from .array import Array, Ragged
from .batch import Batch, join, rows, rows_by_group, shared, take
from .inputs import Inputs, Turn
from .media import Media

__all__ = ["Conditions", "LatentSegment", "Sampler", "Status", "TextSegment", "Track"]


class Status(IntEnum):
    """Why generation of a sample finished."""

    COMPLETED = 0
    TRUNCATED = 1
    """Stopped by a length limit."""
    ABORTED = 2
    """Stopped before it was complete; not trained on."""
    PADDING = 3
    """A copy that pads a batch; its weight is 0."""


@dataclass(frozen=True, kw_only=True)
class Conditions(Batch):
    """Conditioning of the samples (prompt embeddings), stored once per input however many samples share it."""

    values: Mapping[str, Ragged] = shared()
    """name -> [U, ...], or U arrays of any shape: one per distinct input."""
    index: Array = rows()
    """[N] int64, the entry of `values` of each sample."""

    def __post_init__(self) -> None:
        self._check_rows()
        inputs = {name: len(value) for name, value in self.values.items()}
        if len(set(inputs.values())) > 1:
            raise BatchError(f"Conditions.values: got {inputs} entries, expected one per input in each.")

    @property
    def num_rows(self) -> int:
        return int(self.index.shape[0])

    def to(self, device: Any) -> Self:
        """The same samples on `device`; itself if it is there. Inputs that none of them uses are not moved."""
        there = super().to(device)
        return there if there is self else super(Conditions, self.compact()).to(device)

    def expanded(self) -> dict[str, Ragged]:
        """name -> [N, ...], or N arrays: one per sample."""
        return self._at(self.index)

    def compact(self) -> Self:
        """The same samples, without unused inputs."""
        import torch

        # Its own signature is untyped.
        unique = cast(Callable[..., tuple[Array, Array]], cast(Any, torch).unique)
        used, index = unique(self.index, return_inverse=True)
        return dataclasses.replace(self, values=self._at(used), index=index)

    def _at(self, index: Array) -> dict[str, Ragged]:
        """The entries of these inputs."""
        is_ragged = any(isinstance(value, tuple) for value in self.values.values())
        # Of an index on a device the host would wait for the values.
        inputs = cast("list[int]", cast(Any, index).tolist()) if is_ragged else []
        return {
            name: take(value, inputs) if isinstance(value, tuple) else value.index_select(0, index)
            for name, value in self.values.items()
        }

    @classmethod
    def _concat(cls, batches: Sequence[Self]) -> Self:
        """All samples. Inputs of the pieces are concatenated, or kept once where the pieces came from one batch."""
        import torch

        first = batches[0].values
        if all(b.values.keys() == first.keys() and all(b.values[n] is first[n] for n in first) for b in batches):
            return cls(values=first, index=torch.cat([batch.index for batch in batches]))
        values = join("Conditions.values", [batch.values for batch in batches])
        offset = 0
        index: list[Array] = []
        for batch in batches:
            index.append(batch.index + offset)
            offset += len(next(iter(batch.values.values()))) if batch.values else 0
        return cls(values=values, index=torch.cat(index))


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """How latents are sampled: kernel and guidance. A request states the one to use, a segment the one that was used,
    and the training forward pass uses the latter."""

    kernel: str
    """Name of the SDE kernel, a short one or `module:Class`."""
    eta: float
    options: tuple[tuple[str, Any], ...] = ()
    """Every other setting of the kernel, by name, including those at their defaults."""
    guidance_scale: float = 1.0
    guidance_mode: str = "batched"
    """Name of the guidance."""
    guidance_options: tuple[tuple[str, Any], ...] = ()
    """Every other setting of the guidance, by name."""


@dataclass(frozen=True, kw_only=True)
class LatentSegment(Batch):
    """Denoising trajectories, stored only at positions needed for training: i and i+1 of each scored step i, and the
    end."""

    latents: Array = rows()
    """[N, K, ...] latents at the stored positions, in the dtype of `sampling.trajectory_dtype`."""
    positions: Array = rows()
    """[N, K] int64, rising; index into `sigmas` of each stored latent; -1 marks an empty slot."""
    sde_steps: Array = rows()
    """[N, S] int64, rising; the steps that were stochastic, step i going from sigmas[i] to sigmas[i+1]; -1 is none."""
    train_steps: Array | None = rows(default=None)
    """[N, R] int64, rising, -1 is none: the SDE steps that are trained on, where they are not all. Below, R is S
    without it; see `scored_steps`."""
    log_probs: Array | None = rows(default=None)
    """[N, R] log-prob of each scored step: the engine's at first, the old log-probs once they are recomputed."""
    means: Array | None = rows(default=None)
    """[N, R, ...] means of the scored steps under the old policy, for losses that use them."""
    reference_means: Array | None = rows(default=None)
    """[N, R, ...] fp32 means of the scored steps under the reference policy, where another process computed them."""
    values: Array | None = rows(default=None)
    """[N, R] fp32: the critic's value before each scored step, with the weights of the rollout."""
    returns: Array | None = rows(default=None)
    """[N, R] fp32: returns, the critic's value targets."""
    advantages: Array | None = rows(default=None)
    """[N, R] fp32 per scored step, finite in empty slots too; takes the place of the track's advantages."""
    step_rewards: Mapping[str, Array] = rows(default_factory=lambda: dict[str, Array]())
    """Name of a reward -> [N, S], what each SDE step gained of it, see `unirl.core.specs.capability.Needs`."""
    sigmas: Array = shared()
    """[T+1] fp32, falling, ending in 0."""
    sampler: Sampler = shared()
    """Kernel and guidance that computed the trajectories."""
    draws: tuple[int, ...] | None = shared(default=None)
    """Indices of the drawn points to train on, of those that a loss draws for each sample; None is all of them."""
    initial_noise: tuple[str, ...] | None = rows(default=None)
    """Digest of the x_T that each sample started from, `unirl.numerics.noise.noise_digest`."""
    step_noise_ids: tuple[tuple[str, ...], ...] | None = rows(default=None)
    """[N] of T keys by which the noise of each step was drawn; None is the sample's own id at every step."""

    def __post_init__(self) -> None:
        self._check_rows()
        expected = list(self.scored_steps.shape)
        for name in ("values", "returns", "advantages"):
            value = cast("Array | None", getattr(self, name))
            if value is not None and list(value.shape) != expected:
                raise BatchError(
                    f"LatentSegment.{name}: got shape {list(value.shape)}, expected {expected}, one entry per scored "
                    "step."
                )

    @property
    def num_rows(self) -> int:
        return int(self.latents.shape[0])

    @property
    def num_steps(self) -> int:
        """Denoise steps T."""
        return int(self.sigmas.shape[0]) - 1

    @property
    def scored_steps(self) -> Array:
        """[N, R] int64, the steps that are scored and trained on: `train_steps`, or all SDE steps."""
        return self.sde_steps if self.train_steps is None else self.train_steps

    @property
    def final(self) -> Array:
        """[N, ...] the clean latents. Raises BatchError when the end was not stored."""
        at_end = self.positions == self.num_steps
        if not bool(at_end.any(dim=1).all()):
            raise BatchError(
                f"LatentSegment.final: position {self.num_steps} is not stored for every sample; "
                "engines store the end of every trajectory."
            )
        slot = at_end.to(dtype=self.positions.dtype).argmax(dim=1)
        return self.latents[range(self.num_rows), slot]

    def with_slots(self, slots: int) -> Self:
        """The same trajectories with room for `slots` positions: what is added has position -1 and latent 0."""
        import torch

        missing = slots - int(self.positions.shape[1])
        if missing <= 0:
            return self
        latents = self.latents.new_zeros((self.num_rows, missing, *self.latents.shape[2:]))
        positions = self.positions.new_full((self.num_rows, missing), -1)
        return dataclasses.replace(
            self,
            latents=torch.cat([self.latents, latents], dim=1),
            positions=torch.cat([self.positions, positions], dim=1),
        )

    @classmethod
    def _concat(cls, batches: Sequence[Self]) -> Self:
        """All samples. Pieces that store fewer positions are filled up with position -1 and latent 0."""
        import torch

        slots = max(int(batch.positions.shape[1]) for batch in batches)
        # Latents that lie elsewhere cannot be filled up here; joining says that their shapes differ.
        filled = [b.with_slots(slots) if isinstance(cast(object, b.latents), torch.Tensor) else b for b in batches]
        return super()._concat(filled)


@dataclass(frozen=True, kw_only=True)
class TextSegment(Batch):
    """Generated tokens per sample: completions of any length, without padding."""

    prompt_tokens: tuple[Array, ...] = rows()
    """Per sample [P_n] int64, the prompt token ids; P_n >= 1."""
    tokens: tuple[Array, ...] = rows()
    """Per sample [L_n] int64, the completion, including the stop token; L_n may be 0."""
    log_probs: tuple[Array, ...] | None = rows(default=None)
    """Per sample [L_n] fp32 at the temperature: the engine's at first, the old log-probs once they are recomputed."""
    engine_log_probs: tuple[Array, ...] | None = rows(default=None)
    """Per sample [L_n] fp32: the engine's log-probs, kept when the old ones are recomputed and a loss needs both."""
    reference_log_probs: tuple[Array, ...] | None = rows(default=None)
    """Per sample [L_n] fp32 under the reference policy, where another process computed them."""
    values: tuple[Array, ...] | None = rows(default=None)
    """Per sample [L_n] fp32: the critic's value before each token, with the weights of the rollout."""
    returns: tuple[Array, ...] | None = rows(default=None)
    """Per sample [L_n] fp32: returns, the critic's value targets."""
    advantages: tuple[Array, ...] | None = rows(default=None)
    """Per sample [L_n] fp32, for algorithms with per-token advantages; others use the track's."""
    mask: tuple[Array, ...] | None = rows(default=None)
    """Per sample [L_n] bool; False tokens are not trained on (tool output, forced text)."""
    temperature: float = shared(default=1.0)
    options: tuple[tuple[str, Any], ...] = shared(default=())
    """The `TextRequest.options` that generated the completions; replay computes with them."""

    def __post_init__(self) -> None:
        self._check_rows()
        for row, prompt in enumerate(self.prompt_tokens):
            if not int(prompt.shape[0]):
                raise BatchError(f"TextSegment.prompt_tokens: row {row} has none; the first token follows something.")
        lengths = self.lengths
        for name in PER_TOKEN:
            values = cast("tuple[Array, ...] | None", getattr(self, name))
            if values is not None and (result := tuple(int(value.shape[0]) for value in values)) != lengths:
                raise BatchError(f"TextSegment.{name}: {result} entries for {lengths} tokens; one per token is needed.")

    @property
    def num_rows(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Generated tokens of each sample."""
        return tuple(int(tokens.shape[0]) for tokens in self.tokens)

    @property
    def sampled_lengths(self) -> tuple[int, ...]:
        """Tokens of each sample without those that `mask` leaves out."""
        return self.lengths if self.mask is None else tuple(int(row.sum()) for row in self.mask)

    @property
    def total_lengths(self) -> tuple[int, ...]:
        """Tokens of each sample including its prompt, the cost of a forward pass."""
        prompts = (int(prompt.shape[0]) for prompt in self.prompt_tokens)
        return tuple(prompt + length for prompt, length in zip(prompts, self.lengths, strict=True))


PER_TOKEN = ("log_probs", "engine_log_probs", "reference_log_probs", "values", "returns", "advantages", "mask")
"""Fields of a text segment with one entry per generated token."""


@dataclass(frozen=True, kw_only=True)
class Track(Batch):
    """All samples of one stage. Padding rows have weight 0 and are ignored everywhere."""

    name: str = shared()
    sample_ids: tuple[str, ...] = rows()
    group_ids: tuple[str, ...] = rows()
    """The group within which a sample's advantage is computed."""
    unit_ids: tuple[str, ...] | None = rows(default=None)
    """Rows of one unit, such as a preference pair, stay in one micro-batch, update and rank; a unit is within a group.
    None makes each row a unit. `Algorithm.advantages` sets it."""
    parent_track: str | None = shared(default=None)
    """Track that these samples were generated from; None for a root."""
    parent_ids: tuple[str, ...] | None = rows(default=None)
    """Sample of the parent track (or prompt, for a root) that each sample was generated from."""
    inputs: Inputs = rows()
    """Inputs of the samples."""
    metadata: tuple[Mapping[str, Any], ...] = rows()
    conditions: Mapping[str, Conditions] = rows(default_factory=lambda: dict[str, Conditions]())
    """By branch of the guidance: `positive`, and `negative` or others under guidance."""
    segment: LatentSegment | TextSegment | None = rows(default=None)
    media: Media | None = rows(default=None)
    """Decoded samples; None where they are not decoded."""
    turns: tuple[tuple[Turn, ...], ...] | None = rows(default=None)
    """Of episodes with an environment: the answers under the name of the stage and the texts of the environment under
    `environment`, in their order. `media` then has the last answers."""
    rewards: Array | None = rows(default=None)
    """[N] fp32, the combined reward. NaN, at weight 0, for a sample that a reward could not score."""
    reward_parts: Mapping[str, Array] = rows(default_factory=lambda: dict[str, Array]())
    """name -> [N]; every reward as it counts, by its name, and its components as `name/part`, among them `original`
    where clipping or a gate changed it. NaN where a sample has no score."""
    reward_weights: Mapping[str, float] = shared(default_factory=lambda: dict[str, float]())
    """Weight of each reward in this step, which may differ from that of the recipe."""
    advantages: Array | None = rows(default=None)
    """[N] fp32."""
    kl_weights: Array | None = rows(default=None)
    """[N] fp32, factor of each sample's KL penalty; None is 1. `Algorithm.advantages` sets it."""
    sample_weights: Array = rows()
    """[N] fp32; 0 is padding or filtered."""
    status: tuple[Status, ...] = rows()
    policy_version: tuple[int, ...] = rows()
    """Version of the policy that generated each sample."""

    def __post_init__(self) -> None:
        self._check_rows()
        if len(set(self.real_ids)) != len(self.real_ids):
            twice = next(i for i in self.real_ids if self.real_ids.count(i) > 1)
            raise BatchError(f"Track.sample_ids: duplicate id {twice!r} in track {self.name!r}; ids must be unique.")
        groups: dict[str, str] = {}
        for unit, group in zip(self.unit_ids or (), self.group_ids, strict=False):
            if groups.setdefault(unit, group) != group:
                raise BatchError(
                    f"Track.unit_ids: unit {unit!r} of track {self.name!r} has rows of groups {groups[unit]!r} and "
                    f"{group!r}, expected rows of one group."
                )

    @property
    def num_rows(self) -> int:
        return len(self.sample_ids)

    @property
    def real_ids(self) -> list[str]:
        """Ids of the samples that are not padding."""
        return [i for i, s in zip(self.sample_ids, self.status, strict=True) if s is not Status.PADDING]

    @property
    def latent(self) -> LatentSegment:
        """The segment of a latent track. Raises BatchError for any other."""
        if not isinstance(self.segment, LatentSegment):
            raise BatchError(f"Track {self.name!r}: got {type(self.segment).__name__}, expected a latent segment.")
        return self.segment

    @property
    def text(self) -> TextSegment:
        """The segment of a text track. Raises BatchError for any other."""
        if not isinstance(self.segment, TextSegment):
            raise BatchError(f"Track {self.name!r}: got {type(self.segment).__name__}, expected a text segment.")
        return self.segment

    def padded(self, to: int) -> Self:
        """The same track with `to` rows: the last unit again, as `padding`."""
        missing = to - self.num_rows
        if missing < 0:
            raise BatchError(f"Track.padded: got {to} rows, expected at least {self.num_rows}, the rows of the track.")
        if missing and not self.num_rows:
            raise BatchError(f"Track.padded: got {to} rows, but track {self.name!r} has no row to copy.")
        if missing == 0:
            return self
        last = self.units()[-1]
        if missing % len(last):
            raise BatchError(
                f"Track.padded: got {to} rows for the {self.num_rows} of track {self.name!r}, expected whole copies of "
                f"its last unit, which has {len(last)} rows."
            )
        return type(self).concat([self, self.padding(last, copies=missing // len(last))])

    def padding(self, rows: Sequence[int], *, copies: int = 1) -> Self:
        """Copies of the unit `rows` with weight 0 and status PADDING; each copy is a separate unit."""
        once = self.select(rows)
        status = (Status.PADDING,) * once.num_rows
        once = dataclasses.replace(once, sample_weights=once.sample_weights * 0, status=status)
        result = once.select([*range(once.num_rows)] * copies)
        if result.unit_ids is None:
            return result
        # Numbered from the number of rows, so that padding a padded track repeats no id.
        numbers = [self.num_rows + place // once.num_rows for place in range(result.num_rows)]
        ids = (f"{unit}/padding-{number}" for unit, number in zip(result.unit_ids, numbers, strict=True))
        return dataclasses.replace(result, unit_ids=tuple(ids))

    def units(self) -> list[list[int]]:
        """Rows of each unit, padding included, in order of first appearance."""
        if self.unit_ids is None:
            return [[row] for row in range(self.num_rows)]
        return list(rows_by_group(self.unit_ids).values())

    def groups(self) -> dict[str, list[int]]:
        """Rows of each group, in order of first appearance; padding left out."""
        result: dict[str, list[int]] = {}
        for row, (group, status) in enumerate(zip(self.group_ids, self.status, strict=True)):
            if status is not Status.PADDING:
                result.setdefault(group, []).append(row)
        return result
