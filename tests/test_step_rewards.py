"""Rewards of SDE steps in whole runs: the samples that they come from, their cost, and workers of Ray."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ray_clusters import joined
from small_runs import catalog, events, plan, rows_of_denoiser, run, steps
from torch import Tensor
from unirl.core.types.request import Request
from unirl.core.types.track import Track
from unirl.engines.trainside.engine import TrainsideEngine
from unirl.models.sd3.model import Sd3Model
from unirl.tools.plan.memory_plan import memory_plan

PROMPTS, SAMPLES, STEPS, SDE = 4, 4, 4, 2
"""Prompts, samples of each, denoise steps, and those of them that have noise: the first ones."""
WORDS = ("algorithm.step_rewards=true", "run.max_steps=2")


def test_what_is_expected_of_a_latent_is_its_ode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Euler steps from the stored latents, with the model itself. Another batch and order of sums: 1e-4 of latents of
    order 1."""
    seen, generate = list[tuple[Track, Tensor]](), TrainsideEngine.generate

    def noted(self: TrainsideEngine, request: Request) -> Track:
        track = generate(self, request)
        model, finals = self._model, list[Tensor]()
        assert isinstance(model, Sd3Model)
        with torch.no_grad():
            for step in range(SDE) if track.latent.scored_steps.numel() else ():
                x = track.latent.latents[:, step].float()
                for sigma, after in zip(track.latent.sigmas[step:-1], track.latent.sigmas[step + 1 :], strict=True):
                    conditions = track.conditions["positive"].expanded()
                    x = x + (after - sigma) * model.velocity(x, sigma.expand(len(x)), conditions)  # type: ignore[arg-type]
                finals.append(x)
        seen.append((track, torch.stack(finals, dim=1) if finals else torch.empty(0)))
        return track

    monkeypatch.setattr(TrainsideEngine, "generate", noted)
    run(tmp_path / "run", *WORDS, "run.max_steps=1")
    (expected, _), (samples, finals) = seen
    assert (samples.num_rows, expected.num_rows) == (PROMPTS * SAMPLES, PROMPTS * SAMPLES * SDE)
    assert samples.latent.positions[0].tolist() == [0, 1, 2, STEPS]
    assert expected.latent.positions.tolist() == [[STEPS]] * expected.num_rows, "clean latents alone"
    gap = expected.latent.final.view_as(finals) - finals
    assert float(gap.abs().max()) < 1e-4, float(gap.abs().max())
    ((metrics,),) = [list(steps(tmp_path / "run").values())]
    assert [f"step_reward/{step}/raised" in metrics for step in range(3)] == [True, True, False]


def test_forwards_are_those_of_the_formula(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix that two of them share is computed once: before step 1 both have the noise of step 0."""
    rows = rows_of_denoiser(monkeypatch)
    run(tmp_path / "run", *WORDS, "run.max_steps=1", "train.updates_per_step=1", "train.old_log_probs=detached")
    # They start from one latent, which the first step of both takes in.
    shared = 1
    rollout, trained = PROMPTS * SAMPLES * (STEPS + SDE * STEPS - shared), PROMPTS * SAMPLES * SDE
    assert rows == {False: rollout, True: trained}
    (started,) = events(tmp_path / "run", "run_started")
    predicted = started["predicted"]["image"]
    assert predicted["rollout_rows"] == PROMPTS * SAMPLES * (STEPS + SDE * STEPS), "an upper bound"
    assert predicted["train_rows"] == trained


def test_the_plan_says_what_they_cost() -> None:
    """`unirl plan` counts operations and images of generation."""
    both, alone = (memory_plan(plan(*words), catalog=catalog()) for words in (WORDS, ()))
    assert both.flops.generate / alone.flops.generate == pytest.approx(1 + SDE, rel=1e-6)
    images = [
        process.items["media"] for each in (both, alone) for process in each.processes if "media" in process.items
    ]
    # One byte a value. Samples and those of their steps are not held at the same time.
    assert images == [PROMPTS * SAMPLES * SDE * 3 * 64 * 64, PROMPTS * SAMPLES * 3 * 64 * 64]


@pytest.mark.slow
def test_workers_of_ray_give_steps_the_same_rewards(tmp_path: Path) -> None:
    run(tmp_path / "here", *WORDS, "run.max_steps=1")
    ranks = ("launcher=ray", "launcher.train_ranks=2", "launcher.cpus=0.1", "launcher.reward_cpus=0.1")
    with joined():
        run(tmp_path / "there", *WORDS, *ranks, "run.max_steps=1")
    here, there = (steps(tmp_path / name)[1] for name in ("here", "there"))
    for key in ("step_reward/0/raised", "step_reward/1/raised", "reward_mean", "advantage_abs_mean", "grad_norm"):
        # Each rank has half of the rows: fp32 sums in another order, relative to the size of the number.
        assert there[key] == pytest.approx(here[key], rel=1e-4, abs=1e-6), key
