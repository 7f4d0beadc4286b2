"""Replay of a track: everything that determines its log-probs is read from the track itself."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from unirl.core.errors import BatchError
from unirl.core.roles import Replayed, ReplayedTokens
from unirl.core.types.array import Ragged
from unirl.core.types.track import TextSegment

from ..diffusion.guidance import NO_GUIDANCE, Cfg, Guidance
from ..diffusion.replay import replay, step_values, velocity_at
from ..diffusion.sampler import guidance_of, kernel_of
from ..tokens.replay import replay_divergence, replay_output_head, replay_text
from .reference import kept_reference_tokens
from .teachers import joined, rows_of_teachers

if TYPE_CHECKING:
    from unirl.core.roles import DiffusionModel, DivergenceKind, Model, Policy, TextModel
    from unirl.core.types.track import Track

    from .log_prob_mismatch import MismatchMeter

__all__ = ["TrackReplay", "replay_step_values"]


class TrackReplay:
    """The model being trained, as a loss uses it. Implements `unirl.core.roles.Forward`.

    Kernel, sigmas, SDE steps and guidance of latent tracks, and the temperature of text tracks, are read from the
    segment, which the engine echoed: there is no second setting that could differ.
    """

    def __init__(
        self,
        model: Model,
        *,
        stacked: bool,
        policy_context: Callable[[Policy], AbstractContextManager[None]],
        packing: bool = True,
        only_positive: bool = False,
    ) -> None:
        """stacked: all SDE steps in one forward, or one after the other.  policy_context: `Backend.policy`.

        packing: pack completions without padding, if the model can.  only_positive: `train.detach_negative`.
        """
        self._model = model
        self._stacked, self._packing, self._only_positive = stacked, packing, only_positive
        self._policy_context = policy_context
        self.trains: Policy = "live"
        """The policy whose outputs have a gradient, with whose weights the model is called."""
        self.meter: MismatchMeter | None = None
        """Measures what the live weights replay, see `unirl.numerics.train.log_prob_mismatch.metered`."""
        self.teachers: Mapping[str, Model] = {}
        """Answer for the policy `reference` in place of the initial weights, see `unirl.core.roles.Job`."""
        self.reference_guidance: float | None = None
        """Scale of classifier-free guidance of the policy `reference`, see `unirl.core.roles.Job`."""

    def __call__(self, track: Track, *, policy: Policy = "live") -> Replayed | ReplayedTokens:
        """log_probs [n, S] and the transitions of every scored step; or of every token, with the entropies.

        With gradient for the policy that trains, unless the caller is in no_grad; without for every other one. Outputs
        of the reference policy that are stored in the track (`unirl.numerics.train.reference`) are used as they are.

        Raises BatchError when the track has no segment, ValueError when its latents are not stored.
        """
        if policy == self.trains:
            replayed = self._replayed(track, policy=policy)
            if self.meter is not None:
                self.meter.observe(track, replayed)
            return replayed
        kept = self._kept_reference(track) if policy == "reference" else None
        if kept is not None:
            return kept
        results: list[tuple[list[int], Replayed | ReplayedTokens]] = []
        for teacher, rows, part in self._shares(track, policy):
            with self._without_gradient(policy, teacher):
                results.append((rows, self._replayed(part, policy=policy)))
        return joined(results) if len(results) > 1 else results[0][1]

    def velocity(
        self, track: Track, x: Tensor, sigma: Tensor, *, policy: Policy = "live", guided: bool = False
    ) -> Tensor:
        """See `unirl.core.roles.Forward`. At the stored points it is the velocity of the replay, bit for bit."""
        segment = track.latent
        _check_points(track, x, sigma)
        guidance = self._guidance(guidance_of(segment.sampler) if guided else NO_GUIDANCE, policy=policy)

        def at_points(part: Track, x: Tensor, sigma: Tensor) -> Tensor:
            return velocity_at(
                cast("DiffusionModel", self._model).velocity,
                x if sigma.ndim == 2 else x[:, None],
                sigma if sigma.ndim == 2 else sigma[:, None],
                conditions=_conditions(part, guidance),
                guidance=guidance,
                stacked=self._stacked,
                only_positive=self._only_positive,
            ).reshape(x.shape)

        if policy == self.trains:
            return at_points(track, x, sigma)
        results: list[tuple[list[int], Tensor]] = []
        for teacher, rows, part in self._shares(track, policy):
            with self._without_gradient(policy, teacher):
                points = (x, sigma) if part is track else (x[rows or [0]], sigma[rows or [0]])
                results.append((rows, at_points(part, *points)))
        return joined(results) if len(results) > 1 else results[0][1]

    def divergence(
        self,
        track: Track,
        *,
        kind: DivergenceKind,
        beta: float = 0.5,
        top_k: int | None = None,
        policy: Policy = "reference",
    ) -> ReplayedTokens:
        """See `unirl.core.roles.Forward`."""
        self._check_text(track)
        if policy == "reference" and track.text.reference_log_probs is not None:
            raise BatchError(
                f"Track {track.name!r}: its reference log-probs come from other workers and are of the sampled tokens "
                "alone; a divergence needs whole distributions. Use launcher.reference=trainside."
            )
        results: list[tuple[list[int], ReplayedTokens]] = []
        for teacher, rows, part in self._shares(track, policy):
            with self._without_gradient(policy, teacher):
                head = replay_output_head(cast("TextModel", self._model), part, packing=self._packing)
            student = cast("TextModel", self._model)
            divergence = replay_divergence(
                student, part, teacher=head, kind=kind, beta=beta, top_k=top_k, packing=self._packing
            )
            results.append((rows, divergence))
        result = joined(results) if len(results) > 1 else results[0][1]
        if self.meter is not None:
            self.meter.observe(track, result)
        return result

    def _shares(self, track: Track, policy: Policy) -> list[tuple[Model | None, list[int], Track]]:
        """The teachers of a policy, each with the rows that it answers for and their track; None is the trained model.

        A teacher of no row has the first one, and the empty list of rows: ranks must call every teacher equally often.
        """
        teachers: Mapping[str, Model] = self.teachers if policy == "reference" else {}
        if len(teachers) < 2:
            return [(next(iter(teachers.values()), None), [*range(track.num_rows)], track)]
        return [
            (teachers[name], rows, track.select(rows or [0]))
            for name, rows in rows_of_teachers(track, teachers).items()
        ]

    @contextmanager
    def _without_gradient(self, policy: Policy, teacher: Model | None) -> Generator[None]:
        """Within the block the model is a teacher, or the trained one with the weights of a policy."""
        if teacher is None:
            with torch.no_grad(), self._policy_context(policy):
                yield
            return
        trained, self._model = self._model, teacher
        try:
            with torch.no_grad():
                yield
        finally:
            self._model = trained

    def decode(self, track: Track, latents: Tensor) -> Tensor:
        """See `unirl.core.roles.Forward`."""
        expected = track.latent.latents[:, 0].shape
        if latents.shape != expected:
            raise BatchError(
                f"Track {track.name!r}: got latents {list(latents.shape)} to decode, expected {list(expected)}."
            )
        return cast("DiffusionModel", self._model).decode(latents)

    def _kept_reference(self, track: Track) -> Replayed | ReplayedTokens | None:
        if isinstance(track.segment, TextSegment):
            return kept_reference_tokens(track.segment)
        means = track.latent.reference_means
        return None if means is None else self._latents(track, means=means)

    def _guidance(self, guidance: Guidance, *, policy: Policy) -> Guidance:
        """Guidance of a policy's velocities; the reference policy may have a separate scale."""
        scale = self.reference_guidance if policy == "reference" else None
        return guidance if scale is None else Cfg(scale=scale)

    def _replayed(self, track: Track, *, policy: Policy = "live") -> Replayed | ReplayedTokens:
        if isinstance(track.segment, TextSegment):
            self._check_text(track)
            return replay_text(cast("TextModel", self._model), track, packing=self._packing)
        return self._latents(track, policy=policy)

    def _check_text(self, track: Track) -> None:
        if not isinstance(track.segment, TextSegment):
            raise BatchError(f"Track {track.name!r}: it is not a text track, so it has no tokens to compare at.")
        if not hasattr(self._model, "score"):
            raise BatchError(f"Track {track.name!r}: it is a text track, but the trained model is not a TextModel.")

    def _latents(self, track: Track, *, policy: Policy = "live", means: Tensor | None = None) -> Replayed:
        segment = track.latent
        guidance = self._guidance(guidance_of(segment.sampler), policy=policy)
        return replay(
            cast("DiffusionModel", self._model).velocity,
            latents=segment.latents,
            positions=segment.positions,
            sigmas=segment.sigmas,
            sde_steps=segment.scored_steps,
            kernel=kernel_of(segment.sampler),
            conditions=_conditions(track, guidance),
            guidance=guidance,
            stacked=self._stacked,
            only_positive=self._only_positive,
            means=means,
        )


def replay_step_values(
    critic: Callable[[Tensor, Tensor, Mapping[str, Ragged]], Tensor], track: Track, *, stacked: bool
) -> Tensor:
    """[n, R] fp32: the critic's value before each scored step of a latent track, under its positive conditions; 0 where
    a row has none.

    critic: takes x [B, ...], sigma [B] and conditions of B rows; returns [B], differentiable outside no_grad.
    stacked: as in `TrackReplay`.
    """
    segment = track.latent
    return step_values(
        critic,
        latents=segment.latents,
        positions=segment.positions,
        sigmas=segment.sigmas,
        steps=segment.scored_steps,
        conditions=_conditions(track, NO_GUIDANCE).get("positive", {}),
        stacked=stacked,
    )


def _conditions(track: Track, guidance: Guidance) -> dict[str, dict[str, Ragged]]:
    """Branch of the guidance -> conditions of each row, of those that the track has."""
    given = track.conditions
    return {branch: given[branch].expanded() for branch in guidance.branches if branch in given}


def _check_points(track: Track, x: Tensor, sigma: Tensor) -> None:
    """x and sigma are points of the track's rows: [n, ...] and [n], or [n, k, ...] and [n, k], k at least 1."""
    shape = tuple(track.latent.latents.shape[2:])
    fits = sigma.ndim in (1, 2) and sigma.numel() and tuple(x.shape) == (*sigma.shape, *shape)
    if not fits or sigma.shape[0] != track.num_rows:
        raise BatchError(
            f"Track {track.name!r}: got x {list(x.shape)} with sigma {list(sigma.shape)}; expected one sigma for each "
            f"latent, [{track.num_rows}] or [{track.num_rows}, k] of them, and latents of shape {list(shape)}."
        )
