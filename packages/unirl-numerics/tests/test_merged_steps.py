"""Steps merged until they have enough noise, against E-GRPO's formula (arXiv 2601.00423)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from unirl.core.types.request import LatentRequest
from unirl.core.types.sampling import LatentSamplingConfig, SdeStepsConfig
from unirl.numerics.diffusion.kernels import Cps, DanceSde, Dpm2, FlowSde
from unirl.numerics.diffusion.merged_steps import merged_steps
from unirl.numerics.diffusion.request import plan_latents
from unirl.numerics.diffusion.schedules import static_sigmas

STEPS, SHIFT, ETA = 16, 3, 0.7
"""Settings of section 4.1."""
ENTROPY = math.sqrt(2 * math.pi * math.e)
"""exp(h) of a normal distribution of standard deviation 1, equation 9 with d = 1."""


def steps_of_paper(threshold: float) -> dict[int, int]:
    """Our step -> number l of the paper's steps in it, from the closed form below equation 11 and `ETA`.

    The paper counts steps down from T, where t is 1 and the form is infinite.
    """
    result: dict[int, int] = {}
    for m in range(STEPS - 1, STEPS // 2, -1):
        for taken in range(1, m):
            below = (STEPS - m) * (STEPS + (SHIFT - 1) * m) * (STEPS + (SHIFT - 1) * (m - taken))
            proportional = SHIFT**2 * STEPS * m * taken / below
            if ENTROPY * ETA * math.sqrt(proportional) >= threshold:
                result[STEPS - m] = taken
                break
    return result


@pytest.mark.parametrize("threshold", [1.8, 2.0, 2.2, 2.6])
def test_merges_are_those_of_the_paper_at_its_thresholds(threshold: float) -> None:
    sigmas = static_sigmas(STEPS, shift=SHIFT)
    expected = steps_of_paper(threshold)
    assert list(expected) == [1, 2, 3, 4, 5, 6, 7] and max(expected.values()) > 1
    for step, taken in expected.items():
        result = merged_steps(FlowSde(eta=ETA), sigmas, step=step, std=threshold / ENTROPY)
        assert torch.equal(result, torch.cat([sigmas[: step + 1], sigmas[step + taken :]]))


def test_the_first_step_has_eta_of_noise_wherever_it_ends() -> None:
    """At sigma 1 the sigma after it stands in, so the standard deviation is eta, by `FlowSde`'s definition; in fp32 it may
    be off by a few of its 6e-8."""
    sigmas = static_sigmas(STEPS, shift=SHIFT)
    assert torch.equal(merged_steps(FlowSde(eta=ETA), sigmas, step=0, std=ETA - 1e-5), sigmas)
    with pytest.raises(ValueError, match=r"step 0 of 16 has 0\.7 noise at most"):
        merged_steps(FlowSde(eta=ETA), sigmas, step=0, std=ETA + 1e-5)


def test_a_constant_noise_level_needs_a_length_of_time() -> None:
    """`dance-sde` adds eta sqrt(t - t'), so 0.3 sqrt(0.25) = 0.15 takes a quarter of the uniform schedule."""
    sigmas = torch.linspace(1, 0, 9)
    assert merged_steps(DanceSde(eta=0.3), sigmas, step=1, std=0.1499).tolist() == [
        *(1.0, 0.875),
        *(0.625, 0.5, 0.375, 0.25, 0.125, 0.0),
    ]


@pytest.mark.parametrize(
    ("kernel", "step", "std", "says"),
    [
        (FlowSde(eta=0.7), 7, 0.1, "step 7 of 8 has no noise at most"),
        (DanceSde(eta=0.3), 6, 0.2, r"got 0\.2; step 6 of 8 has 0\.106 noise at most"),
        # What is left of the noise falls with the length of the step: sin(pi / 4) * 0.75.
        (Cps(eta=0.5), 1, 0.6, r"step 1 of 8 has 0\.53 noise at most"),
        (Dpm2(), 1, 0.1, "with kernel 'dpm2', expected a OneStepKernel"),
    ],
)
def test_noise_that_no_merge_has_is_refused(kernel: Any, step: int, std: float, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        merged_steps(kernel, torch.linspace(1, 0, 9), step=step, std=std)


def planned(sde: SdeStepsConfig, *, rollout: int = 0, **settings: Any) -> LatentRequest:
    return plan_latents(
        LatentSamplingConfig(num_inference_steps=STEPS, kernel="flow-sde", eta=ETA, sde=sde, **settings),
        sigmas=static_sigmas(STEPS, shift=SHIFT),
        latent_shape=(2, 4),
        seed=3,
        rollout=rollout,
        sample_ids=("a/0", "a/1", "b/0"),
        group_ids=("a", "a", "b"),
        trajectory="full",
    )


def test_every_rollout_has_the_schedule_of_its_step() -> None:
    taken = {0: 1} | steps_of_paper(2.2)
    sde = SdeStepsConfig(mode="window", window=1, strategy="random", last=0.5, min_noise_std=2.2 / ENTROPY)
    seen: set[int] = set()
    for rollout in range(60):
        request = planned(sde, rollout=rollout)
        ((step,),) = request.sde_steps.unique(dim=0).tolist()
        assert (
            len(request.sigmas) == STEPS + 2 - taken[step] and request.keep.tolist()[0][-1] == len(request.sigmas) - 1
        )
        seen.add(step)
    assert seen == set(range(8)), "the paper trains on the first half of the steps"


def test_a_pool_with_a_step_that_cannot_have_the_noise_fails_whichever_is_drawn() -> None:
    """The last step but one goes from 0.3 to 0.1667: 0.7 sqrt(0.3 / 0.7 * 0.1333) = 0.167, by equation 10."""
    sde = SdeStepsConfig(mode="random", count=1, last=0.95, min_noise_std=0.2)
    for rollout in range(5):
        with pytest.raises(ValueError, match=r"step 14 of 16 has 0\.167 noise at most"):
            planned(sde, rollout=rollout)


def test_without_a_least_noise_the_schedule_stays() -> None:
    request = planned(SdeStepsConfig(mode="fixed", steps=[4]))
    assert torch.equal(request.sigmas, static_sigmas(STEPS, shift=SHIFT))
