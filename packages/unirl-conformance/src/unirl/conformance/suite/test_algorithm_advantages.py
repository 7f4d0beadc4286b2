"""From rewards to advantages."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor
from unirl.conformance.claims import claim
from unirl.conformance.fixtures.algorithm import AlgorithmCase
from unirl.conformance.verdicts import NotApplicable
from unirl.core.specs.config import AdvantageConfig
from unirl.core.types.track import LatentSegment, Track

GROUPS = "aaabbbbccdd"
ONE = (0.25, 0.5, 1.0, 0.0, 0.75, 0.125, 0.375, 1.0, 0.5, 0.0, 0.625)
TWO = (1.0, 0.0, 0.5, 0.25, 0.75, 0.0, 1.0, 0.375, 0.625, 0.5, 0.25)
"""Multiples of 1/8, so that sums with whole numbers are exact in fp32."""
ROUNDING = 1e-5
"""Advantages are fp32 numbers of order 1, and an algorithm may compute them in fp32 throughout: ten operations of 6e-8,
over a spread of a third."""


@claim("algorithm", track="any")
def test_advantages_do_not_depend_on_the_order_of_the_rows(case: AlgorithmCase) -> None:
    """A sample's advantage does not depend on where it and its group are in the batch; with a critic, neither do those
    of its tokens.

    If it fails: advantages are taken over slices (`rewards.view(-1, group_size)`) instead of by group id.
    """
    order = [(7 * row + 3) % len(GROUPS) for row in range(len(GROUPS))]
    for config in _configs(case, scopes=("group", "global"), centers=("group",)):
        plain = case.advantages({"one": ONE, "two": TWO}, GROUPS, advantage=config)
        mixed = case.advantages(
            {"one": [ONE[row] for row in order], "two": [TWO[row] for row in order]},
            "".join(GROUPS[row] for row in order),
            advantage=config,
            rows=order,
        )
        case.record(_name(config), float((mixed - plain[order]).abs().max()), bound=ROUNDING)


@claim("algorithm", track="any")
def test_advantages_are_centred_in_their_group(case: AlgorithmCase) -> None:
    """With `advantage.center: group` a sample is compared only with its group: the advantages of a group sum to 0, and
    raising all scores of a prompt changes none of them.

    If it fails: the mean is taken over the batch instead of the group, or something is added after it.
    """
    if not case.needs().compares_groups:
        raise NotApplicable(f"algorithm {case.spec.name!r} compares samples with a critic, not with their group")
    raised = {group: number for number, group in enumerate("abcd", start=1)}
    for config in _configs(case, scopes=("group", "global"), centers=("group",)):
        result = case.advantages({"one": ONE, "two": TWO}, GROUPS, advantage=config)
        for group in raised:
            total = float(result[_rows(group)].mean())
            case.record(f"{_name(config)}: mean of group {group}", total, bound=ROUNDING)
        if config.scope == "group":
            one = [value + raised[group] for value, group in zip(ONE, GROUPS, strict=True)]
            moved = case.advantages({"one": one, "two": TWO}, GROUPS, advantage=config)
            case.record(
                f"{_name(config)}: change when groups score higher", float((moved - result).abs().max()), bound=ROUNDING
            )


@claim("algorithm", track="any")
def test_a_higher_reward_gives_a_higher_advantage(case: AlgorithmCase) -> None:
    """Within a group, advantages are ordered like rewards, so that training favours the better samples. With a critic,
    a higher reward gives the tokens of a completion higher advantages.

    If it fails: a sign is wrong in `advantages()`, or it reads something else than the rewards that have a weight.
    """
    if not case.needs().compares_groups:
        _check_each_alone(case)
        return
    for config in _configs(case, scopes=("group", "global"), centers=("group",)):
        result = case.advantages({"one": ONE}, GROUPS, advantage=config)
        for group in "abcd":
            rows = sorted(_rows(group), key=lambda row: ONE[row])
            values = result[rows].tolist()
            assert all(low < high for low, high in itertools.pairwise(values)), (
                f"{_name(config)}: rewards {[ONE[row] for row in rows]} of a group get the advantages {values}"
            )


@claim("algorithm", track="any")
def test_advantages_are_finite_for_every_shape_of_group(case: AlgorithmCase) -> None:
    """Groups lose samples to filters and failures: a group of one, a group of equal rewards and rows of weight 0
    still give finite advantages, and a row of weight 0 does not affect the others, even if its reward is NaN.

    If it fails: look for a standard deviation of one sample (Bessel's n - 1 is 0), a division by a standard deviation
    of 0 without `eps`, or a mean that counts rows of weight 0.
    """
    groups = "abbcccccbbc"
    weights = [1.0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0]
    one = [0.5, 0.25, 0.25, 0.0, 1.0, 0.5, 0.75, 0.25, float("nan"), float("nan"), float("nan")]
    counted = [row for row, weight in enumerate(weights) if weight]
    for config in _configs(case, scopes=("group", "global"), centers=("group", "global"), ddofs=(0, 1)):
        if config.normalize and (config.scope, config.center) == ("group", "global"):
            # Such a division of a group by its own spread about another mean has no meaning.
            continue
        result = case.advantages({"one": one, "two": one}, groups, advantage=config, weights=weights)
        bad = [row for row in range(len(groups)) if not bool(torch.isfinite(result[row]))]
        assert not bad, f"{_name(config)}: advantages are {result.tolist()} for groups {groups} of weights {weights}"
        kept = [one[row] for row in counted]
        alone = case.advantages({"one": kept, "two": kept}, "".join(groups[row] for row in counted), advantage=config)
        moved = float((result[counted] - alone).abs().max())
        case.record(f"{_name(config)}: change by rows of weight 0", moved, bound=ROUNDING)


@claim("algorithm", track="any")
def test_kept_samples_have_the_advantages_of_their_whole_group(case: AlgorithmCase) -> None:
    """`advantage.keep_best` and `advantage.keep_worst` choose samples by their advantages in the whole group, before
    `advantage.clip`; the samples that are kept have the same advantages as without these settings.

    If it fails: the settings are ignored, advantages are computed after samples were dropped, or samples are chosen by
    clipped advantages. `unirl.numerics.train.track_advantages` does all of it.
    """
    if not case.needs().compares_groups:
        raise NotApplicable(f"algorithm {case.spec.name!r} compares samples with a critic, not with their group")
    for config in _configs(case, scopes=("group", "global"), centers=("group",)):
        ids = case.compared({"one": ONE, "two": TWO}, GROUPS, advantage=config).sample_ids
        values = case.advantages({"one": ONE, "two": TWO}, GROUPS, advantage=config).tolist()
        chosen: list[int] = []
        for group in "abcd":
            ranked = sorted(_rows(group), key=lambda row: (values[row], ids[row]))
            chosen += (ranked[0], ranked[-1])
        for clip in (None, 0.25):
            name, every = f"{_name(config)}, clip {clip}", dataclasses.replace(config, clip=clip)
            whole = case.compared({"one": ONE, "two": TWO}, GROUPS, advantage=every)
            chosen_alone = dataclasses.replace(every, keep_best=1, keep_worst=1)
            kept = case.compared({"one": ONE, "two": TWO}, GROUPS, advantage=chosen_alone)
            expected = whole.select(sorted(chosen))
            assert kept.sample_ids == expected.sample_ids, (
                f"{name}: kept {kept.sample_ids}; the best and the worst of each group are {expected.sample_ids}"
            )
            for what, one, other in _advantages(kept, expected):
                case.record(f"{name}: change of advantages {what}", float((one - other).abs().max()), bound=ROUNDING)


def _advantages(one: Track, other: Track) -> Iterator[tuple[str, Tensor, Tensor]]:
    assert one.advantages is not None and other.advantages is not None
    yield "of samples", one.advantages, other.advantages
    if isinstance(one.segment, LatentSegment) and one.segment.advantages is not None:
        assert other.latent.advantages is not None
        yield "of steps", one.segment.advantages, other.latent.advantages


def _check_each_alone(case: AlgorithmCase) -> None:
    before = case.advantages({"one": ONE}, GROUPS)
    for row in range(len(GROUPS)):
        raised = [value + 0.5 * (place == row) for place, value in enumerate(ONE)]
        after = case.advantages({"one": raised}, GROUPS)
        assert after[row] > before[row], (
            f"with a reward of {raised[row]} in place of {ONE[row]} the advantage of a text went from "
            f"{float(before[row]):g} to {float(after[row]):g}; it must rise"
        )


def _configs(
    case: AlgorithmCase, *, scopes: tuple[str, ...], centers: tuple[str, ...], ddofs: tuple[int, ...] = (0,)
) -> Iterator[AdvantageConfig]:
    """Every setting of how samples are compared, the default alone where they are not; without a bound, which may bind
    anywhere."""
    if not case.needs().compares_groups:
        yield AdvantageConfig(clip=None)
        return
    combines = ("sum-then-normalize", "normalize-then-sum")
    for scope, center, ddof, normalize, loo, combine in itertools.product(
        scopes, centers, ddofs, (True, False), (False, True), combines
    ):
        yield dataclasses.replace(
            AdvantageConfig(clip=None),
            scope=scope,
            center=center,
            ddof=ddof,
            normalize=normalize,
            leave_one_out=loo,
            combine=combine,
        )


def _name(config: AdvantageConfig) -> str:
    flags = [f"center {config.center}", f"std {config.scope if config.normalize else 'none'}", config.combine]
    flags += ["leave one out"] if config.leave_one_out else []
    flags += ["Bessel"] if config.ddof else []
    return ", ".join(flags)


def _rows(group: str) -> list[int]:
    return [row for row, name in enumerate(GROUPS) if name == group]
