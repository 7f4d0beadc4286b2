"""Algorithms with a critic."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from unirl.conformance.claims import claim
from unirl.conformance.doubles.wrapped_algorithms import KeepsOldLogProbs
from unirl.conformance.fixtures.algorithm import AlgorithmCase
from unirl.conformance.fixtures.training_setup import AUX, TrainingSetup
from unirl.conformance.verdicts import NotApplicable
from unirl.core.types.track import Track
from unirl.numerics.train.actions import per_action
from unirl.numerics.train.critic import with_values

ROUNDING = 1e-5
"""Advantages and returns are fp32 numbers of order 1, of sums over all actions in fp64."""


@claim("algorithm", track="any")
def test_ranks_make_the_advantages_of_tokens_together(case: AlgorithmCase) -> None:
    """Advantages and returns of tokens or denoise steps from a critic do not depend on the partition of samples over
    ranks: they equal those of one process with all samples.

    Three ranks, one of them with padding only; with every key of `when` on.

    If it fails: take means and spreads from sums that went through `sum_over_ranks`, on every rank and equally often,
    and leave rows of weight 0 out of them.
    """
    for on in case.variants():
        setup = _setup(case, on)
        whole = setup.with_old_log_probs()
        rows = range(setup.track.num_rows)
        shares = [list(rows[::2]), list(rows[1::2])]
        parts = [*(setup.track.select(share) for share in shares), setup.track.select([0]).padded(2).select([1])]
        result = _together(setup, parts)
        for share, part in zip(shares, result, strict=False):
            expected = whole.select(share)
            for name in ("advantages", "returns"):
                one, other = per_action(part, name), per_action(expected, name)
                largest = float((one - other).abs().max() / other.abs().max())
                case.record(f"{'+'.join(on) or 'plain'}, {name} of {len(share)} samples", largest, bound=ROUNDING)


@claim("algorithm", track="any")
def test_three_updates_lower_the_loss_of_the_critic(case: AlgorithmCase) -> None:
    """The critic's gradient is that of its loss: each of three small gradient steps lowers it on the same samples.

    If it fails: the values of the terms of `critic_loss()` and their gradient belong to different losses: a sign, a
    clip without its other side, or a detach in the wrong place.
    """
    setup = _setup(case)
    track, fixed = setup.with_old_log_probs(), KeepsOldLogProbs(setup.algorithm)
    report, gradient = setup.train(track, algorithm=fixed)
    squares = sum(float(value.double().square().sum()) for name, value in gradient.items() if name.startswith(AUX))
    assert squares > 0, "the critic's gradient is 0 although its values are not the returns"
    # Each step promises a thousandth, ten thousand times the rounding of a mean of fp32 numbers of order 1.
    promised = 1e-3
    losses = [report.only["critic_loss"]]
    for _ in range(3):
        setup.train(track, algorithm=fixed, critic_lr=promised / squares)
        losses.append(setup.train(track, algorithm=fixed)[0].only["critic_loss"])
    case.record("gain of three updates over what the gradient promised", (losses[0] - losses[-1]) / (3 * promised))
    assert all(after < before for before, after in itertools.pairwise(losses)), (
        f"the critic's loss over three updates is {', '.join(f'{loss:.7g}' for loss in losses)}; each must lower it"
    )


def _setup(case: AlgorithmCase, on: Sequence[str] = ()) -> TrainingSetup:
    setup = case.setup(on, is_ragged=True)
    if setup.critic is None:
        raise NotApplicable(f"algorithm {case.spec.name!r} needs no critic")
    return setup


def _together(setup: TrainingSetup, parts: Sequence[Track]) -> list[Track]:
    """The part of each rank with advantages, in one process: repeated until the sums of all calls are known."""
    critic = setup.critic
    assert critic is not None
    with torch.no_grad():
        there = [setup.algorithm.with_old_log_probs(part.to(setup.model.device), setup.replay()) for part in parts]
    there = [with_values(part, critic) for part in there]
    sums: list[Tensor] = []
    while True:
        asked: list[list[Tensor]] = []
        result: list[Track] = []
        for part in there:
            calls: list[Tensor] = []

            def joined(value: Tensor, calls: list[Tensor] = calls) -> Tensor:
                calls.append(value)
                return sums[len(calls) - 1] if len(calls) <= len(sums) else value

            result.append(setup.critic_algorithm.after_anchor(part, joined)[0])
            asked.append(calls)
        counts = [len(calls) for calls in asked]
        assert len(set(counts)) == 1, f"sum_over_ranks is called {counts} times on three ranks; every other rank hangs"
        if counts[0] == len(sums):
            return result
        sums.append(torch.stack([calls[len(sums)] for calls in asked]).sum(dim=0))
