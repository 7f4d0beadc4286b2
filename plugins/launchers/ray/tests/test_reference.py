"""A reference policy on its own workers: the numbers of a copy that the train ranks keep."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_runs import events, run, steps, tensors
from unirl.core.errors import PlanRejected
from unirl.core.limits import broken_limits
from unirl.core.specs.memory import RewardProcesses
from unirl.launchers.ray.config import RayConfig
from unirl.launchers.ray.placement import misfit, places

KL = ("run.max_steps=2", "run.save_every=2", "algorithm.kl_coef=0.5")
APART = ("launcher=ray", "launcher.reference=separate", "launcher.reference_workers=2")


@pytest.mark.slow
@pytest.mark.nightly
def test_workers_of_the_reference_give_the_numbers_of_a_copy(tmp_path: Path, ray_here: None) -> None:
    here = run(tmp_path / "here", *KL, "launcher=local", "backend.reference_copy=true").folder
    there = run(tmp_path / "there", *KL, *APART).folder
    assert steps(here)[2]["kl"] > 0, "after an update the policy has left the reference"
    for step in (1, 2):
        for key in ("loss", "kl", "grad_norm", "reward_mean"):
            # fp32 rounds a loss of order 1 to 6e-8; the reference answers in batches of another size.
            assert steps(there)[step][key] == pytest.approx(steps(here)[step][key], rel=1e-5, abs=1e-6), (step, key)
    expected, result = tensors(here, 2), tensors(there, 2)
    weights = [name for name in result if "weights" in name and isinstance(result[name], torch.Tensor)]
    assert weights
    for name in weights:
        torch.testing.assert_close(result[name], expected[name], rtol=0, atol=1e-6)
    assert not any(name.startswith("/reference") or "/reference/" in name for name in result), "no rank holds a copy"
    assert not events(there, "finding"), "no worker was replaced, and nothing else was to be said"


@pytest.mark.slow
@pytest.mark.nightly
def test_a_reference_that_nobody_asks_is_refused(tmp_path: Path, ray_here: None) -> None:
    with pytest.raises(PlanRejected, match=r"launcher\.reference: got 'separate', but algorithm 'flow-grpo'"):
        run(tmp_path / "run", "run.max_steps=1", *APART)


def test_reference_workers_have_a_place_of_their_own() -> None:
    config = RayConfig(train_ranks=2, reference="separate", reference_workers=3, cpus=2, gpus=0.5)
    scorers = [RewardProcesses(rewards=("shapes",), count=1, device="none")]
    asked = places(config, on_cuda=True, rewards=scorers)
    assert [place.name for place in asked if place.role == "reference"] == [f"reference-{n}" for n in range(3)]
    assert "(2 train x 2 + 3 reference x 2 + 1 reward x 0.5)" in misfit(asked, [])
    assert not [place for place in places(RayConfig(), on_cuda=False) if place.role == "reference"]
    (wrong,) = broken_limits(RayConfig(reference="colocate"), key="launcher")
    assert str(wrong).startswith("launcher.reference: got 'colocate', expected one of trainside, separate")
