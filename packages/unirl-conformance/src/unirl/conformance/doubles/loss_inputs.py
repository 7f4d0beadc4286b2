"""Inputs of a loss in NumPy: the numbers of a training setup, recomputed from its track."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from unirl.conformance.reference import FurtherPoints, LossInputs, PointLossInputs, RewardLossInputs, TokenLossInputs
from unirl.core.roles import Forward, Policy, Replayed, ReplayedTokens
from unirl.core.types.track import Status, Track
from unirl.numerics.tokens.batches import pad_batch
from unirl.numerics.train.actions import per_action
from unirl.numerics.train.forwards import ForwardWrapper

from ..fixtures.training_setup import TrainingSetup
from .pixel_score import REWARD_WEIGHTS, PixelScore
from .tiny_decoder import TinyDecoder
from .track_numbers import log_probs_of

__all__ = ["loss_inputs", "point_inputs", "replayed", "reward_inputs"]


def replayed(setup: TrainingSetup, policy: Policy) -> Replayed | ReplayedTokens:
    """The setup's track under a policy's weights as they are now."""
    with torch.no_grad():
        return setup.replay()(setup.track.to(setup.model.device), policy=policy)


def loss_inputs(
    setup: TrainingSetup,
    track: Track,
    *,
    new: Replayed | ReplayedTokens,
    old: Replayed | ReplayedTokens,
    progress: float,
) -> LossInputs | TokenLossInputs:
    """track: with old log-probs.  new, old: `replayed` with the weights that train, and those that the loss compares
    with."""
    given = log_probs_of(track)
    shared: dict[str, Any] = {
        "log_probs": _numpy(new.log_probs),
        "old_log_probs": _numpy(old.log_probs if given is None else given),
        "weights": _numpy(track.sample_weights),
        "progress": progress,
        "advantages": None if track.advantages is None else _numpy(track.advantages),
        "kl_weights": None if track.kl_weights is None else _numpy(track.kl_weights),
    }
    if setup.critic is not None:
        assert track.rewards is not None
        with torch.no_grad():
            values = setup.critic.values(track.to(setup.model.device))
        shared |= {"advantages": None, "rewards": _numpy(track.rewards), "values": _numpy(values)}
        shared |= {"old_values": _numpy(per_action(track, "values"))}
    reference = replayed(setup, "reference")
    if isinstance(new, ReplayedTokens):
        return _of_tokens(setup, track, new, cast(ReplayedTokens, reference), shared)
    return _of_steps(track, new, cast(Replayed, old), cast(Replayed, reference), shared)


def _of_steps(track: Track, new: Replayed, old: Replayed, reference: Replayed, shared: dict[str, Any]) -> LossInputs:
    segment, shape = track.latent, new.log_probs.shape
    if shared["advantages"] is not None and segment.advantages is not None:
        shared = {**shared, "advantages": _numpy(segment.advantages)}
    return LossInputs(
        means=_numpy(new.means),
        old_means=_numpy(old.means),
        reference_means=_numpy(reference.means),
        std=_numpy(new.std.reshape(shape)),
        g=_numpy(new.g.reshape(shape)),
        sigmas=_numpy(segment.sigmas),
        sde_steps=np.asarray(segment.sde_steps.cpu()),
        sampler=segment.sampler,
        **shared,
    )


def _of_tokens(
    setup: TrainingSetup, track: Track, new: ReplayedTokens, reference: ReplayedTokens, shared: dict[str, Any]
) -> TokenLossInputs:
    assert new.entropy is not None
    compares_distributions = setup.needs.log_probs == "none" and setup.needs.reference != "none"
    return TokenLossInputs(
        engine_log_probs=_numpy(per_action(setup.track, "log_probs")),
        reference_log_probs=_numpy(reference.log_probs),
        distributions=_distributions(setup) if compares_distributions else None,
        entropy=_numpy(new.entropy),
        valid=np.asarray(new.valid.cpu()),
        is_truncated=np.asarray([status is Status.TRUNCATED for status in track.status]),
        units=track.units(),
        **shared,
    )


def _distributions(setup: TrainingSetup) -> dict[str, Any]:
    """Distributions of the live and the reference policy over every token, with the current weights."""
    text, model = setup.track.text, setup.model
    assert isinstance(model, TinyDecoder)
    batch = pad_batch(text.prompt_tokens, text.tokens, pad_token=model.pad_token)
    policies: tuple[Policy, ...] = ("live", "reference")
    result: dict[str, Any] = {}
    for policy in policies:
        with torch.no_grad(), setup.policies(policy):
            flat = model.log_distributions(batch, temperature=text.temperature)
        rows = flat.split(list(text.lengths))
        result[policy] = _numpy(torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True))
    return result


def point_inputs(setup: TrainingSetup, track: Track, *, progress: float) -> PointLossInputs:
    """track: with old log-probs. The points are those that the loss asks for, which must be the same for every policy
    unless there is a fake score."""
    points = _recorded(setup, track, progress=progress).points
    assert points, "the spec needs no trajectory, and loss() asks for no velocity"
    first, *further = points
    assert not further or setup.fake_score is not None, "policies are asked for at different points"
    old = track.latent.log_probs
    # An algorithm without advantages weighs nothing by them.
    advantages = torch.zeros(track.num_rows) if track.advantages is None else track.advantages
    return PointLossInputs(
        clean=_numpy(track.latent.final),
        x=first.x,
        sigma=first.sigma,
        velocities=first.velocities,
        further=further,
        old_log_probs=None if old is None else _numpy(old),
        units=track.units(),
        advantages=_numpy(advantages),
        weights=_numpy(track.sample_weights),
        progress=progress,
    )


def reward_inputs(
    setup: TrainingSetup, track: Track, *, progress: float, forward: Forward | None = None
) -> RewardLossInputs:
    """track: with old log-probs. The images are those that the loss decodes, in its order.  forward: in place of the
    setup's."""
    images = _recorded(setup, track, progress=progress, forward=forward).images
    assert images, "the spec needs differentiable rewards, and loss() decodes nothing"
    score = PixelScore(weights=REWARD_WEIGHTS)
    everyone = dataclasses.replace(track, sample_weights=torch.ones_like(track.sample_weights))
    return RewardLossInputs(
        rewards=_numpy(torch.stack([score(everyone, each) for each in images], dim=1)),
        weights=_numpy(track.sample_weights),
        progress=progress,
    )


class _Recorder(ForwardWrapper):
    """Keeps the points that a loss asks for with the answers, and the images that it decodes."""

    def __init__(self, forward: Forward) -> None:
        super().__init__(forward)
        self.points: list[FurtherPoints] = []
        """Velocities by the points they were asked at, in the order of the first call."""
        self.images: list[Tensor] = []

    def velocity(
        self, track: Track, x: Tensor, sigma: Tensor, *, policy: Policy = "live", guided: bool = False
    ) -> Tensor:
        result = super().velocity(track, x, sigma, policy=policy, guided=guided)
        there, level = _numpy(x), _numpy(sigma)
        known = [each for each in self.points if np.array_equal(each.x, there) and np.array_equal(each.sigma, level)]
        if not known:
            known = [FurtherPoints(x=there, sigma=level, velocities={})]
            self.points += known
        cast("dict[str, Any]", known[0].velocities)[policy] = _numpy(result)
        return result

    def decode(self, track: Track, latents: Tensor) -> Tensor:
        self.images.append(super().decode(track, latents))
        return self.images[-1]


def _recorded(setup: TrainingSetup, track: Track, *, progress: float, forward: Forward | None = None) -> _Recorder:
    recorder = _Recorder(forward or setup.replay())
    with torch.no_grad():
        setup.losses(track, replay=recorder, progress=progress)
    return recorder


def _numpy(value: Any) -> Any:
    return np.asarray(value.detach().cpu().double())
