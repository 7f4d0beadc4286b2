"""Scoring a track: every reward runs, every value is checked, and the weighted sum becomes the track's reward."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .array import Array
from .errors import RewardFailed, UniRLError
from .roles import Reward, ScoreInput, Scores

if TYPE_CHECKING:
    from .track import Track

__all__ = ["constant_reward", "score", "score_input"]


def score_input(track: Track) -> ScoreInput:
    """What rewards see of a track."""
    return ScoreInput(
        sample_ids=track.sample_ids,
        group_ids=track.group_ids,
        prompts=track.prompts,
        metadata=track.metadata,
        images=track.images,
        videos=track.videos,
        texts=track.texts,
    )


def score(track: Track, rewards: Mapping[str, Reward], weights: Mapping[str, float]) -> Track:
    """The track with `rewards` (weighted sum) and `reward_parts` (each reward, and its components as `name/part`).

    Raises RewardFailed when a reward raises, gives another number of values than samples, or one that is not finite.
    """
    samples = score_input(track)
    parts: dict[str, Array] = {}
    total: Array | None = None
    for name, reward in rewards.items():
        scores = _run(name, reward, samples)
        for part, values in {name: scores.values, **{f"{name}/{p}": v for p, v in scores.parts.items()}}.items():
            parts[part] = _checked(part, values, track)
        weighted = parts[name] * weights[name]
        total = weighted if total is None else total + weighted
    return dataclasses.replace(track, rewards=total, reward_parts=parts)


def constant_reward(track: Track) -> float | None:
    """The one value that every sample got, or None when they differ; a batch like that teaches nothing."""
    assert track.rewards is not None
    counted = track.rewards[track.weights > 0]
    if counted.numel() > 1 and bool((counted == counted[0]).all()):
        return float(counted[0])
    return None


def _run(name: str, reward: Reward, samples: ScoreInput) -> Scores:
    try:
        return reward.score(samples)
    except UniRLError:
        raise
    except Exception as error:
        raise RewardFailed(
            f"reward.{name}: raised {type(error).__name__}: {error} on a batch of {len(samples.sample_ids)} samples."
        ) from error


def _checked(name: str, values: Array, track: Track) -> Array:
    if tuple(values.shape) != (track.num_rows,):
        raise RewardFailed(
            f"reward.{name}: gave values of shape {tuple(values.shape)} for {track.num_rows} samples; "
            "a reward gives one number per sample, in their order."
        )
    values = values.detach().float().cpu()
    finite = values.isfinite()
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0])
        raise RewardFailed(
            f"reward.{name}: gave {float(values[row])} for sample {track.sample_ids[row]!r} "
            f"(prompt {track.prompts[row]!r}). A score must be finite; make the reward raise where it cannot score."
        )
    return values
