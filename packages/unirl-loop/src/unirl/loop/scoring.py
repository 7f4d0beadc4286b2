"""Scoring a track: every reward runs, every value is checked, and the weighted sum becomes the track's reward."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unirl.core.errors import RewardFailed
from unirl.core.match.composition import counted_range
from unirl.core.roles import Reward, ScoreInput
from unirl.core.roles.environment import RETURN
from unirl.core.types.array import Array
from unirl.core.types.batch import rows_by_group
from unirl.core.types.media import Media, MediaKind
from unirl.core.types.track import TextSegment

if TYPE_CHECKING:
    from unirl.core.specs.plan import RewardChoices
    from unirl.core.types.track import Track

__all__ = [
    "MediaScore",
    "agreements",
    "check_scored",
    "combined",
    "constant_reward",
    "has_advantages",
    "known",
    "mean_parts",
    "reaches",
    "score",
    "score_by",
    "score_input",
]

NONE = float("nan")
"""Marks a sample without a score."""


def score_input(track: Track) -> ScoreInput:
    """The input of rewards for a track.

    Media are contiguous, as they are after a transfer: a mean over pixels adds in memory order, and must be the same
    number wherever the sample is scored.
    """
    return ScoreInput(
        sample_ids=track.sample_ids,
        group_ids=track.group_ids,
        inputs=track.inputs,
        metadata=track.metadata,
        media=None if track.media is None else track.media.mapped(lambda array: array.contiguous()),
        status=track.status,
        lengths=track.segment.sampled_lengths if isinstance(track.segment, TextSegment) else None,
    )


def score(
    track: Track, rewards: Mapping[str, Reward], weights: Mapping[str, float], choices: RewardChoices | None = None
) -> Track:
    """The track with `rewards` (weighted sum) and `reward_parts` (each reward, and its components as `name/part`).

    choices: rewards of the plan, with the clipping and the gate of each; None applies neither.
    """
    return combined(track, {name: score_by(name, reward, track) for name, reward in rewards.items()}, weights, choices)


def score_by(name: str, reward: Reward, track: Track) -> dict[str, Array]:
    """The scores of one reward for a track: its values under its name, and its components as `name/part`; each [N] fp32
    on the CPU.

    NaN where a sample has no score. reward: checks its own scores, as a `CheckedReward` does.
    """
    scores = reward.score(score_input(track))
    result = {name: scores.values, **{f"{name}/{part}": values for part, values in scores.parts.items()}}
    return {part: _scored(values, scores.scored).detach().float().cpu() for part, values in result.items()}


@dataclass(frozen=True, kw_only=True)
class MediaScore:
    """The weighted sum of differentiable rewards, where training runs. Implements `unirl.core.roles.GradientScore`."""

    rewards: Mapping[str, Reward]
    weights: Mapping[str, float]
    """Weights where a track has no `reward_weights`; 0 for a reward that is only a gate, and needs no gradient."""
    kind: MediaKind
    """Kind of the media."""
    rate: float | None = None
    """Frames per second of videos."""
    choices: RewardChoices | None = None
    """Rewards of the plan, with the clipping and the gate of each; None applies neither."""

    def __call__(self, track: Track, media: Array) -> Array:
        """Rows of weight 0 are padding: they are not scored and get 0, unless all rows are."""
        counted = track.sample_weights > 0
        if not bool(counted.any()) or bool(counted.all()):
            return self._of_rows(track, media)
        rows = [row for row in range(track.num_rows) if bool(counted[row])]
        scores = self._of_rows(track.select(rows), media[rows])
        return scores.new_zeros(track.num_rows).index_put((counted.to(media.device),), scores)

    def _of_rows(self, track: Track, media: Array) -> Array:
        import torch

        wants_gradient = torch.is_grad_enabled() and media.requires_grad
        samples, scores = score_input(dataclasses.replace(track, media=None)), dict[str, Array]()
        media = media.contiguous()
        for name, reward in self.rewards.items():
            seen = Media(kind=self.kind, values=media if self.weights[name] else media.detach(), rate=self.rate)
            reply = reward.score(dataclasses.replace(samples, media=seen))
            if reply.scored is not None and not bool(reply.scored.all()) and bool((track.sample_weights > 0).any()):
                raise RewardFailed(
                    f"reward.{name}: got a sample without a score in the loss, expected scores of all samples that it "
                    "scored in the rollout; there is no gradient to train on."
                )
            values = _scored(reply.values, reply.scored)
            if wants_gradient and self.weights[name] and not values.requires_grad:
                raise RewardFailed(
                    f"reward.{name}: got scores without a gradient, expected scores that depend on the pixels. Its "
                    "spec states `reward-differentiable`; look for a `detach` or `no_grad` in it."
                )
            scores[name] = values.to(media.device, dtype=media.dtype)
        total: Array | None = None
        for name, values in counted_scores(scores, self.choices).items():
            if self.weights[name]:
                weighted = values * track.reward_weights.get(name, self.weights[name])
                total = weighted if total is None else total + weighted
        assert total is not None, "match() refuses a stage without rewards that count"
        return total


def combined(
    track: Track,
    scores: Mapping[str, Mapping[str, Array]],
    weights: Mapping[str, float],
    choices: RewardChoices | None = None,
) -> Track:
    """The track with the results of `score_by` for each reward: their weighted sum, and all parts. The return of its
    episodes, if it has one, is one of them.

    A sample that lacks a score of a reward with a weight gets no sum, and weight 0.
    Raises RewardFailed when a sum is not finite although every score is: a weight is not, or fp32 overflows.
    """
    if RETURN in track.reward_parts:
        scores = {**scores, RETURN: track.reward_parts}
        weights = {**weights, RETURN: track.reward_weights[RETURN]}
    values = counted_scores({name: parts[name] for name, parts in scores.items()}, choices)
    total: Array | None = None
    lacks: Array | None = None
    for name, counted in values.items():
        weighted = (counted if weights[name] else counted.nan_to_num(nan=0.0)) * weights[name]
        total = weighted if total is None else total + weighted
        if weights[name]:
            lacks = counted.isnan() if lacks is None else lacks | counted.isnan()
    if total is not None and (row := _not_finite(total if lacks is None else total.where(~lacks, 0.0))) is not None:
        terms = " + ".join(f"{weights[name]:g} {name}" for name in scores)
        raise RewardFailed(
            f"reward: the weighted sum {terms} is {float(total[row])} for sample {track.sample_ids[row]!r} "
            f"(prompt {track.inputs.prompts[row]!r}), though every score is finite; check the weights and the scale "
            "of the scores."
        )
    parts: dict[str, Array] = {}
    for name, own in scores.items():
        parts |= own if values[name] is own[name] else {**own, name: values[name], f"{name}/original": own[name]}
    if lacks is not None and bool(lacks.any()):
        counts = (~lacks).to(track.sample_weights)
        track = dataclasses.replace(track, sample_weights=track.sample_weights * counts)
    own_weights = {name: float(weights[name]) for name in scores}
    return dataclasses.replace(track, rewards=total, reward_parts=parts, reward_weights=own_weights)


def counted_scores(scores: Mapping[str, Array], choices: RewardChoices | None) -> dict[str, Array]:
    """Each reward's scores [N] after clipping and gates; NaN marks a missing score. Differentiable.

    A score beyond `clip` is clamped; a sample that fails the gate gets the lowest score that can count.
    """
    result = dict(scores)
    for name, choice in (choices or {}).items():
        if name in scores and choice.config.clip is not None:
            result[name] = result[name].clamp(*choice.config.clip)
        if name in scores and choice.config.gate.reward:
            passes, lowest = _passes(name, scores, choices or {}), counted_range(choice)[0]
            result[name] = result[name].where(result[name].isnan() | (passes > 0), lowest).where(passes >= 0, NONE)
    return result


def _passes(name: str, scores: Mapping[str, Array], choices: RewardChoices) -> Array:
    """[N]: 1 where the gate's reward scores high enough and its own gate passes too, else 0; NaN where unknown."""
    gate = choices[name].config.gate
    assert gate.at_least is not None, "match() refuses a gate without a threshold"
    values = scores[gate.reward].detach()
    passes = reaches(values, gate.at_least).to(values.dtype).where(~values.isnan(), NONE)
    return passes * _passes(gate.reward, scores, choices) if choices[gate.reward].config.gate.reward else passes


def reaches(values: Array, threshold: float) -> Array:
    """[N] bool. Scores are sums of floats: one that meets the threshold exactly must not miss it by rounding."""
    return values >= threshold - 1e-6


def check_scored(track: Track, rewards: Iterable[str]) -> None:
    """Raises RewardFailed when no sample of a track has a score of one of these rewards, or has all that it needs."""
    lacking = [name for name in rewards if not known(track.reward_parts[name]).numel()]
    if lacking or (track.rewards is not None and not known(track.rewards).numel()):
        owner, what = (f"reward.{lacking[0]}", "a score") if lacking else ("reward", "a score of every reward")
        raise RewardFailed(
            f"{owner}: none of the {track.num_rows} samples of track {track.name!r} has {what}. Look at the replies "
            "of the reward's model or service, and at the samples."
        )


def known(values: Array) -> Array:
    """The values [N] without NaN."""
    missing = values.isnan()
    return values[~missing] if bool(missing.any()) else values


def mean_parts(track: Track) -> dict[str, float]:
    """Metrics: the mean of each of `reward_parts` over the samples that have it, and the share that lack a score."""
    result: dict[str, float] = {}
    for part, values in track.reward_parts.items():
        there = known(values)
        if there.numel():
            result[f"reward/{part}"] = float(there.mean())
        if there.numel() < values.numel() and "/" not in part:
            result[f"reward/{part}/unscored"] = 1 - there.numel() / values.numel()
    return result


def agreements(track: Track) -> dict[str, float]:
    """Metrics: whether each reward orders the samples of a prompt as the weighted sum does, where there is more than
    one.

    Of the pairs of one group that both tell apart, the share in the same order less the share in the other: 1 to -1
    (Goodman and Kruskal's gamma). Missing without such a pair.
    """
    names = [part for part in track.reward_parts if "/" not in part]
    if track.rewards is None or len(names) < 2:
        return {}
    groups = list(rows_by_group(track.group_ids).values())

    def orders(values: Array) -> list[Array]:
        """[n, n] for each group: 1 where the first is higher, -1 where the second is, 0 for ties and missing scores."""
        return [(values[rows, None] - values[None, rows]).sign().nan_to_num(nan=0.0) for rows in groups]

    total, result = orders(track.rewards), dict[str, float]()
    for name in names:
        both = [one * other for one, other in zip(orders(track.reward_parts[name]), total, strict=True)]
        if told := sum(float(each.abs().sum()) for each in both):
            result[f"reward/{name}/agreement"] = sum(float(each.sum()) for each in both) / told
    return result


def constant_reward(track: Track) -> float | None:
    """The one value that every sample got, or None when they differ."""
    assert track.rewards is not None
    counted = track.rewards[track.sample_weights > 0]
    if counted.numel() > 1 and bool((counted == counted[0]).all()):
        return float(counted[0])
    return None


def has_advantages(track: Track, *, reward: float) -> bool:
    """Whether a sample or one of its actions has an advantage. Samples that all got this reward have one where an
    algorithm compares them with those of earlier steps, or adds something to the reward.

    What is left of a mean's rounding is none: at most 1e-12 of the reward, with sums in fp64 and a division by the
    `eps` of `advantage`.
    """
    rounding = 1e-9 * max(1.0, abs(reward))
    actions = track.segment.advantages if track.segment is not None else None
    values = [track.advantages, *(actions if isinstance(actions, tuple) else [actions])]
    return any(bool((value.abs() > rounding).any()) for value in values if value is not None)


def _scored(values: Array, scored: Array | None) -> Array:
    """The values, with NaN for samples without a score."""
    return values if scored is None else values.where(scored.to(values.device), NONE)


def _not_finite(values: Array) -> int | None:
    """The first row that is not finite, if there is one."""
    finite = values.isfinite()
    return None if bool(finite.all()) else int((~finite).nonzero()[0])
