"""Scores depend on the sample itself, and on nothing else."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from unirl.conformance.claims import claim
from unirl.conformance.fixtures.reward import RewardCase, flags_of, pictures, pixels_of, with_media
from unirl.conformance.verdicts import NotApplicable, NotRun
from unirl.core.roles import ScoreInput, Scores
from unirl.core.specs.capability import Cap

WEIGHTS = (0.25, -3.0)
"""Besides 1: smaller, larger and negative, as for a reward that is to be avoided."""


@claim("reward")
def test_every_sample_gets_one_finite_score(case: RewardCase) -> None:
    """Each of N samples gets one finite number, unless it has no score: `values` is a tensor [N] in fp32.

    If it fails: look at the end of `score`: `squeeze()` on a batch of one, a trailing dimension of 1, values in bf16
    or fp64, a division by a spread that may be 0.
    """
    with case.reward() as reward:
        for samples in case.batches():
            scores = reward.score(samples)
            values = scores.values
            rows = len(samples.sample_ids)
            assert isinstance(values, torch.Tensor), f"`values` is a {type(values).__name__}, no tensor"
            assert tuple(values.shape) == (rows,), f"{rows} samples got values of shape {list(values.shape)}"
            assert values.dtype == torch.float32, f"the values are {values.dtype}, float32 is promised"
            assert bool(values[flags_of(scores)].isfinite().all()), (
                f"values that are not finite came instead of an error: {values}"
            )


@claim("reward")
def test_scores_go_with_their_samples(case: RewardCase) -> None:
    """Samples in another order get the same scores in that order: rows of a rollout may be anywhere.

    If it fails: look for something that is counted by row (a seed or a baseline by index), for results of several
    workers that are joined in the order in which they end, for sorting that is not undone.
    """
    with case.reward() as reward:
        for samples in case.batches():
            order = torch.randperm(len(samples.sample_ids), generator=torch.Generator().manual_seed(3)).tolist()
            expected = _picked(case.score(reward, samples), order)
            case.same("moved by another order", case.score(reward, samples.select(order)), expected)


@claim("reward", proves=Cap.REWARD_SAMPLE)
def test_a_sample_scores_the_same_in_any_batch(case: RewardCase) -> None:
    """One by one, samples get the scores that they get together: batch sizes and ranks do not change what is learned.

    If it fails: look for statistics over the batch (a mean that is subtracted, batch norm in training mode), padding
    that is not masked, a dependence on the group.
    """
    with case.reward() as reward:
        for samples in case.batches():
            together = case.score(reward, samples)
            alone = [case.score(reward, samples.select([row])) for row in range(len(samples.sample_ids))]
            case.same("moved by the batch", _joined(alone), together)


@claim("reward", proves=Cap.REWARD_GROUP)
def test_a_group_scores_the_same_in_any_batch(case: RewardCase) -> None:
    """The scores of a group depend on its own samples, wherever their rows are and whatever else is in the batch.

    If it fails: compare samples by `group_ids`, not by their place in the batch, and take no statistics over all rows.
    """
    with case.reward() as reward:
        for samples in case.batches():
            together = case.score(reward, samples)
            groups = [_rows_of(samples, group) for group in dict.fromkeys(samples.group_ids)]
            alone = [case.score(reward, samples.select(rows)) for rows in groups]
            expected = [_picked(together, rows) for rows in groups]
            case.same("moved by other groups", _joined(alone), _joined(expected))


@claim("reward")
def test_a_sample_has_a_score_in_every_batch_or_in_none(case: RewardCase) -> None:
    """`scored` is a tensor [N] of bool and says the same of a sample in any order and in any batch: which samples are
    left out of training depends on nothing but the sample, or its group.

    If it fails: set `scored` by the reply about each sample; look for results of several workers that are joined in
    another order, and for a batch that is given up because one sample of it failed.
    """
    leaves_out = False
    by_group = Cap.REWARD_GROUP in case.spec.capabilities
    with case.reward() as reward:
        for samples in case.batches():
            count = len(samples.sample_ids)
            scored = reward.score(copy.deepcopy(samples)).scored
            if scored is not None:
                leaves_out = True
                assert isinstance(scored, torch.Tensor), f"`scored` is a {type(scored).__name__}, no tensor"
                result = f"{scored.dtype} {list(scored.shape)}"
                assert result == f"torch.bool [{count}]", f"`scored` is {result} for {count} samples, not of bool [N]"
            together = flags_of(case.score(reward, samples))
            order = torch.randperm(count, generator=torch.Generator().manual_seed(3)).tolist()
            groups = [_rows_of(samples, group) for group in dict.fromkeys(samples.group_ids)]
            for rows in [order, *(groups if by_group else [[row] for row in range(count)])]:
                result = flags_of(case.score(reward, samples.select(rows)))
                assert torch.equal(result, together[rows]), (
                    f"of samples {rows} `scored` is {together[rows].tolist()} in the whole batch, "
                    f"and {result.tolist()} where they come alone in this order"
                )
    if not leaves_out:
        raise NotApplicable("the reward gives no `scored`: every sample has a score")


@claim("reward")
def test_scores_lie_in_the_stated_range(case: RewardCase) -> None:
    """No score leaves the `range` of the spec: thresholds, weights and plots are chosen by it.

    If it fails: state the range that the scores have, at every setting of the config, or bring them to the stated one.
    """
    low, high = case.spec.range
    if math.isinf(low) and math.isinf(high):
        raise NotApplicable("the spec bounds the scores on neither side")
    # A mean or a sum of fp32 numbers may pass an exact bound by its rounding.
    slack = 1e-6 * max(1.0, *(abs(bound) for bound in (low, high) if math.isfinite(bound)))
    with case.reward() as reward:
        for samples in [*case.batches(), *case.batches(seed=1)]:
            tried = [samples]
            if case.has_pixels:
                corners = [pixels.to(case.device) for pixels in _corners(samples)]
                tried += [with_media(samples, pixels, media=case.spec.media) for pixels in corners]
            for batch in tried:
                scores = case.score(reward, batch)
                values = scores.values[flags_of(scores)]
                if not values.numel():
                    continue
                result = (float(values.min()), float(values.max()))
                assert low - slack <= result[0] and result[1] <= high + slack, (
                    f"scores from {result[0]:.6g} to {result[1]:.6g} came; the spec says {low:g} to {high:g}"
                )


@claim("reward")
def test_different_samples_get_different_scores(case: RewardCase) -> None:
    """Samples that differ do not all get one score: a reward that is constant teaches nothing.

    If it fails: give the spec `examples` that the reward can tell apart (right and wrong answers); or look for a
    rounding, a clamp or a default that swallows every difference.
    """
    with case.reward() as reward:
        batches = [*case.batches(), *case.batches(seed=1)]
        every = [case.score(reward, samples) for samples in batches]
        values = torch.cat([scores.values[flags_of(scores)] for scores in every])
    assert bool((values != values[0]).any()), f"all {len(values)} samples got {float(values[0]):g}"
    case.record("spread of the scores", float(values.std(correction=0)))


@claim("reward")
def test_the_scale_is_the_same_at_every_weight(case: RewardCase) -> None:
    """A score means the same whatever `weight` the recipe gives: the loop applies weights, once, when it adds up.

    If it fails: take the factor `config.weight` out of the reward.
    """
    for number in range(len(case.batches())):
        with case.reward(weight=1.0) as reward:
            plain = case.score(reward, case.batches()[number])
        for weight in WEIGHTS:
            with case.reward(weight=weight) as reward:
                case.same("moved by its weight", case.score(reward, case.batches()[number]), plain)


@claim("reward")
def test_components_are_those_of_the_spec(case: RewardCase) -> None:
    """The components beside the score are the spec's `parts`, each one finite number a sample: logs show them.

    If it fails: make the spec's `parts` and the names in `Scores.parts` the same, and give every part at every call.
    """
    stated = sorted(case.spec.parts)
    with case.reward() as reward:
        for samples in case.batches():
            scores = reward.score(samples)
            parts = scores.parts
            assert sorted(parts) == stated, f"the parts are {sorted(parts)}; the spec names {stated}"
            for name, values in parts.items():
                rows = len(samples.sample_ids)
                assert tuple(values.shape) == (rows,), f"part {name!r} has shape {list(values.shape)}, not [{rows}]"
                assert bool(values[flags_of(scores)].float().isfinite().all()), f"part {name!r} is not finite: {values}"


@claim("reward")
def test_scoring_is_deterministic(case: RewardCase) -> None:
    """Scoring a batch twice gives the same numbers: evaluations compare two moments of a run by nothing but scores.

    If it fails: look for dropout or batch norm in training mode, augmentation, a random generator, statistics that a
    reward carries from one call to the next.
    """
    with case.reward() as reward:
        for number, samples in enumerate(case.batches()):
            first = case.score(reward, samples)
            again = case.score(reward, case.batches()[number])
            if case.device == "cpu":
                rows = flags_of(first) & flags_of(again)
                assert torch.equal(first.values[rows], again.values[rows]), (
                    f"the same samples got {first.values.tolist()}, then {again.values.tolist()}"
                )
            # On a GPU, kernels may add in another order each time.
            case.same("moved by a second call", again, first)


@claim("reward")
def test_scores_do_not_depend_on_names(case: RewardCase) -> None:
    """Other samples under the same ids get their own scores. Every evaluation of a run uses the same ids.

    If it fails: a cache takes the sample id, the prompt or the place in the batch for the sample; key it by content.
    """
    differs = False
    for number, other in enumerate(case.batches(seed=1)):
        with case.reward() as reward:
            expected = case.score(reward, other)
        with case.reward() as reward:
            before = case.score(reward, case.batches()[number])
            case.same("moved by earlier ids", case.score(reward, case.batches(seed=1)[number]), expected)
        differs = differs or not torch.equal(before.values, expected.values)
    if not differs:
        raise NotRun("both sets of samples get the same scores, so nothing can be told from them")


@claim("reward")
def test_a_reward_does_not_modify_samples(case: RewardCase) -> None:
    """Scoring changes neither pixels nor metadata: other rewards, trackers and the update read them afterwards.

    If it fails: look for operations in place (`clamp_`, `mul_`, `sub_`) on the images, which also reach them through
    `detach()` and views, and for `metadata` or lists that are written to.
    """
    with case.reward() as reward:
        for number, samples in enumerate(case.batches()):
            metadata = copy.deepcopy(samples.metadata)
            reward.score(samples)
            before = case.batches()[number]
            assert samples.metadata == metadata, f"the metadata was {metadata}, now it is {samples.metadata}"
            if case.has_pixels:
                assert torch.equal(pixels_of(samples), pixels_of(before)), "the pixels were changed in place"


def _rows_of(samples: ScoreInput, group: str) -> list[int]:
    return [row for row, result in enumerate(samples.group_ids) if result == group]


def _picked(scores: Scores, rows: list[int]) -> Scores:
    """Scores of these rows, in this order."""
    return Scores(
        values=scores.values[rows],
        parts={name: values[rows] for name, values in scores.parts.items()},
        scored=flags_of(scores)[rows],
    )


def _joined(scores: Sequence[Scores]) -> Scores:
    """Scores of several batches, one after the other. All have the parts of the first."""
    return Scores(
        values=torch.cat([one.values for one in scores]),
        parts={name: torch.cat([one.parts[name] for one in scores]) for name in scores[0].parts},
        scored=torch.cat([flags_of(one) for one in scores]),
    )


def _corners(samples: ScoreInput) -> list[torch.Tensor]:
    """All black, all white, and noise of 0 and 1: the corners of what a decoder can give."""
    shape = pixels_of(samples).shape
    noise = pictures(shape[0], tuple(shape[1:]), seed=2).round()
    return [torch.zeros(shape), torch.ones(shape), noise]
