"""What a loss in NumPy is given: the numbers of a trial, recomputed from its track."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from unirl.conformance.reference import LossInputs, PointLossInputs, RewardLossInputs, TokenLossInputs
from unirl.core.roles import Forward, Policy, Replayed, ReplayedTokens
from unirl.core.types.track import Status, Track
from unirl.numerics.tokens.batches import pad_batch
from unirl.numerics.tokens.replay import per_token
from unirl.numerics.train.actions import per_action

from ..fixtures.trial import Trial
from .forward import SameForward
from .pixel_score import REWARD_WEIGHTS, PixelScore
from .text_model import TextWorkbenchModel

__all__ = ["loss_inputs", "point_inputs", "replayed", "reward_inputs"]


def replayed(trial: Trial, policy: Policy) -> Replayed | ReplayedTokens:
    """The trial's track under a policy's weights as they are now."""
    with torch.no_grad():
        return trial.replay()(trial.track.to(trial.model.device), policy=policy)


def loss_inputs(
    trial: Trial, track: Track, *, new: Replayed | ReplayedTokens, old: Replayed | ReplayedTokens, progress: float
) -> LossInputs | TokenLossInputs:
    """track: anchored.  new, old: `replayed` with the weights that train, and those that the loss compares with."""
    reference = replayed(trial, "reference")
    if trial.is_text:
        assert isinstance(new, ReplayedTokens) and isinstance(old, ReplayedTokens)
        assert isinstance(reference, ReplayedTokens)
        return _of_tokens(trial, track, new, old, reference, progress=progress)
    assert isinstance(new, Replayed) and isinstance(old, Replayed) and isinstance(reference, Replayed)
    return _of_steps(trial, track, new, old, reference, progress=progress)


def point_inputs(trial: Trial, track: Track, *, progress: float) -> PointLossInputs:
    """track: anchored. The points are those that the loss asks for, which must be the same for every policy."""
    asked = _Recorded(trial.replay())
    with torch.no_grad():
        trial.losses(track, replay=asked, progress=progress)
    points = list(asked.points.values())
    assert points, "the spec needs no trajectory, and loss() asks for no velocity"
    x, sigma, _ = points[0]
    assert all(torch.equal(x, other) for other, _, _ in points), "policies are asked for at different points"
    old = track.latent.log_probs
    # An algorithm without advantages weighs nothing by them.
    advantages = torch.zeros(track.num_rows) if track.advantages is None else track.advantages
    return PointLossInputs(
        clean=_numpy(track.latent.final),
        x=_numpy(x),
        sigma=_numpy(sigma),
        velocities={policy: _numpy(velocity) for policy, (_, _, velocity) in asked.points.items()},
        old_log_probs=None if old is None else _numpy(old),
        units=track.units(),
        advantages=_numpy(advantages),
        weights=_numpy(track.sample_weights),
        progress=progress,
    )


def reward_inputs(trial: Trial, track: Track, *, progress: float) -> RewardLossInputs:
    """track: anchored. The images are those that the loss decodes, in its order."""
    asked = _Decoded(trial.replay())
    with torch.no_grad():
        trial.losses(track, replay=asked, progress=progress)
    assert asked.images, "the spec needs differentiable rewards, and loss() decodes nothing"
    score = PixelScore(weights=REWARD_WEIGHTS)
    everyone = dataclasses.replace(track, sample_weights=torch.ones_like(track.sample_weights))
    return RewardLossInputs(
        rewards=_numpy(torch.stack([score(everyone, images) for images in asked.images], dim=1)),
        weights=_numpy(track.sample_weights),
        progress=progress,
    )


class _Decoded(SameForward):
    """Keeps the images that a loss decodes."""

    def __init__(self, forward: Forward) -> None:
        super().__init__(forward)
        self.images: list[Tensor] = []

    def decode(self, track: Track, latents: Tensor) -> Tensor:
        self.images.append(super().decode(track, latents))
        return self.images[-1]


class _Recorded(SameForward):
    """Keeps the points that a loss asks for, and the answers, by policy."""

    def __init__(self, forward: Forward) -> None:
        super().__init__(forward)
        self.points: dict[Policy, tuple[Tensor, Tensor, Tensor]] = {}

    def velocity(
        self, track: Track, x: Tensor, sigma: Tensor, *, policy: Policy = "live", guided: bool = False
    ) -> Tensor:
        result = super().velocity(track, x, sigma, policy=policy, guided=guided)
        self.points[policy] = (x, sigma, result)
        return result


def _judged(trial: Trial, track: Track) -> dict[str, Any]:
    """What a critic adds; nothing where there is none."""
    if trial.critic is None:
        return {"advantages": None if track.advantages is None else _numpy(track.advantages)}
    assert track.rewards is not None
    with torch.no_grad():
        now = trial.critic.values(track.to(trial.model.device))
    return {
        "advantages": None,
        "rewards": _numpy(track.rewards),
        "values": _numpy(now),
        "old_values": _numpy(per_action(track, "values")),
    }


def _of_steps(
    trial: Trial, track: Track, new: Replayed, old: Replayed, reference: Replayed, *, progress: float
) -> LossInputs:
    per_step: Callable[[Tensor], Any] = lambda value: _numpy(value.reshape(new.log_probs.shape))  # noqa: E731
    segment = track.latent
    return LossInputs(
        log_probs=_numpy(new.log_probs),
        old_log_probs=_numpy(old.log_probs if segment.log_probs is None else segment.log_probs),
        means=_numpy(new.means),
        old_means=_numpy(old.means),
        reference_means=_numpy(reference.means),
        std=per_step(new.std),
        g=per_step(new.g),
        sigmas=_numpy(segment.sigmas),
        sde_steps=np.asarray(segment.sde_steps.cpu()),
        sampler=segment.sampler,
        weights=_numpy(track.sample_weights),
        progress=progress,
        **_judged(trial, track),
    )


def _of_tokens(
    trial: Trial, track: Track, new: ReplayedTokens, old: ReplayedTokens, reference: ReplayedTokens, *, progress: float
) -> TokenLossInputs:
    segment = track.text
    assert new.entropy is not None
    return TokenLossInputs(
        log_probs=_numpy(new.log_probs),
        old_log_probs=_numpy(old.log_probs if segment.log_probs is None else per_token(segment, "log_probs")),
        engine_log_probs=_numpy(per_token(trial.track.text, "log_probs")),
        reference_log_probs=_numpy(reference.log_probs),
        distributions=_distributions(trial)
        if trial.needs.log_probs == "none" and trial.needs.reference != "none"
        else None,
        entropy=_numpy(new.entropy),
        valid=np.asarray(new.valid.cpu()),
        weights=_numpy(track.sample_weights),
        is_truncated=np.asarray([status is Status.TRUNCATED for status in track.status]),
        units=track.units(),
        progress=progress,
        **_judged(trial, track),
    )


def _distributions(trial: Trial) -> dict[str, Any]:
    """Of the live and the reference policy over every token, as the weights are now."""
    text, model = trial.track.text, trial.model
    assert isinstance(model, TextWorkbenchModel)
    batch = pad_batch(text.prompt_tokens, text.tokens, pad_token=model.pad_token)
    policies: tuple[Policy, ...] = ("live", "reference")
    result: dict[str, Any] = {}
    for policy in policies:
        with torch.no_grad(), trial.policies(policy):
            flat = model.log_distributions(batch, temperature=text.temperature)
        rows = flat.split(list(text.lengths))
        result[policy] = _numpy(torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True))
    return result


def _numpy(value: Any) -> Any:
    return np.asarray(value.detach().cpu().double())
