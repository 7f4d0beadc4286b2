"""Runs of one recipe by several launchers, compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from small_runs import steps, tensors

RANKS = {1: ("launcher=ray",), 2: ("launcher=ray", "launcher.train_ranks=2")}
SEPARATE = ("launcher=ray", "launcher.placement=separate", "launcher.rollout_workers=2", "launcher.reward_workers=2")
COLOCATE = ("launcher=ray", "launcher.placement=colocate", "launcher.train_ranks=2", "launcher.carrier=ray")
KL_TARGET, KL_HORIZON, SAMPLES = 6.5e-4, 80, 16

BAR = 1e-6
"""Losses and weights are of order 1 and below; fp32 rounds those to 6e-8, and ranks add in another order.

A KL is mean(d^2) / 2 over standardised differences d of two means. With rms(d) = sqrt(2 KL) = 0.06 and means that another
batch rounds by 1e-5 of a standard deviation (ten layers, sums of 64 to 256 terms), it moves by 0.06 * 1e-5 = 6e-7.
Gradients are at most 0.1 and round by 1e-6 of that, so eight updates move a weight by 8 lr / eps * 1e-7 = 8e-8, and its
own rounding by 3e-8 each.
"""

NUMBERS = ("loss", "reward_mean", "reward_std", "ratio_max_dev_first", "kl")
Steps = dict[int, dict[str, float]]


def assert_same_run(left: Path, right: Path, *, within: float, last: int = 4, numbers: Sequence[str] = NUMBERS) -> None:
    """Numbers of every step, and everything that is saved of the last one; `within` 0 is bit for bit."""
    both = steps(left), steps(right)
    assert [sorted(result)[:last] for result in both] == [list(range(1, last + 1))] * 2
    for step in range(1, last + 1):
        for key in numbers:
            assert both[0][step][key] == pytest.approx(both[1][step][key], rel=0, abs=within), (step, key)
    assert_same_coefficients(*both, last=last)
    expected, result = tensors(left, last), tensors(right, last)
    assert expected.keys() == result.keys()
    assert any(isinstance(value, torch.Tensor) for value in expected.values())
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(result[name], value, rtol=0, atol=within, msg=lambda m, n=name: f"{n}: {m}")
        else:
            assert result[name] == value, name


def assert_same_coefficients(left: Steps, right: Steps, *, last: int) -> None:
    """Coefficients of the KL, as far apart as their KLs let them be.

    A step makes c (1 + g r) of a coefficient c, with g = samples / horizon and r = clip(kl / target - 1, -0.2, 0.2). A
    difference of the KL arrives times c g / target, here 150, and what was there grows by 1 + 0.2 g at most.
    """
    gain, bound = SAMPLES / KL_HORIZON, 0.0
    for step in range(1, last + 1):
        pair = left[step], right[step]
        if "kl_coef" not in pair[0]:
            return
        coefficients = [numbers["kl_coef"] for numbers in pair]
        # The driver computes them in fp64.
        assert coefficients[0] == pytest.approx(coefficients[1], rel=0, abs=bound + 1e-14), step
        apart = abs(pair[0]["kl"] - pair[1]["kl"])
        bound = bound * (1 + 0.2 * gain) + max(coefficients) * gain / KL_TARGET * apart
