"""Scouts in whole runs: the same initial noise, the forwards they cost, and workers of Ray."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray_clusters import joined
from small_runs import catalog, events, plan, rows_of_denoiser, run, steps
from unirl.core.types.request import Request
from unirl.core.types.track import Track
from unirl.engines.trainside.engine import TrainsideEngine
from unirl.numerics.noise import INITIAL, noise, noise_digest
from unirl.tools.plan.memory_plan import memory_plan

PROMPTS, EXACT, SCOUTS, STEPS, FEW = 4, 4, 10, 4, 2
"""Prompts, exact samples and scouts of each, and denoise steps of both."""
WORDS = (f"data.scouts.samples_per_prompt={SCOUTS}", f"data.scouts.num_inference_steps={FEW}", "run.max_steps=2")


def test_an_exact_sample_starts_from_the_noise_of_its_scout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracks, generate = list[Track](), TrainsideEngine.generate

    def noted(self: TrainsideEngine, request: Request) -> Track:
        tracks.append(generate(self, request))
        return tracks[-1]

    monkeypatch.setattr(TrainsideEngine, "generate", noted)
    run(tmp_path / "run", *WORDS, "run.max_steps=1")
    scouts, exact = tracks
    assert (scouts.num_rows, exact.num_rows) == (PROMPTS * SCOUTS, PROMPTS * EXACT)
    starts = [dict(zip(each.sample_ids, each.latent.initial_noise or (), strict=True)) for each in tracks]
    assert len(set(starts[0].values())) == PROMPTS * SCOUTS
    for sample, digest in starts[1].items():
        (expected,) = noise_digest(
            noise(seed=0, rollout=0, ids=[sample], step=INITIAL, shape=tuple(exact.latent.latents.shape[2:]))
        )
        assert starts[0][sample] == digest == expected
    assert [len(each.latent.sigmas) - 1 for each in tracks] == [FEW, STEPS]
    assert scouts.latent.latents.shape[1] == 1, "a scout keeps its final latents alone"
    ((metrics,),) = [list(steps(tmp_path / "run").values())]
    assert -1 <= metrics["scouts/rank_correlation"] <= 1


def test_forwards_are_those_of_the_formula(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of_denoiser(monkeypatch)
    run(tmp_path / "run", *WORDS, "run.max_steps=1", "train.updates_per_step=1", "train.old_log_probs=detached")
    rollout = PROMPTS * (EXACT * STEPS + SCOUTS * FEW)
    # The last half of the steps has no noise.
    trained = PROMPTS * EXACT * STEPS // 2
    assert rows == {False: rollout, True: trained}
    (started,) = events(tmp_path / "run", "run_started")
    predicted = started["predicted"]["image"]
    assert (predicted["rollout_rows"], predicted["train_rows"]) == (rollout, trained)
    assert predicted["old_log_prob_rows"] == 0


def test_the_plan_says_what_scouts_cost() -> None:
    """`unirl plan` counts operations of generation by the same forwards."""
    both, alone = (memory_plan(plan(*words), catalog=catalog()) for words in (WORDS, ()))
    assert both.flops.generate / alone.flops.generate == pytest.approx(1 + SCOUTS * FEW / (EXACT * STEPS), rel=1e-6)
    images = [
        process.items["media"] for each in (both, alone) for process in each.processes if "media" in process.items
    ]
    assert images == [PROMPTS * SCOUTS * 3 * 64 * 64, PROMPTS * EXACT * 3 * 64 * 64], "one byte a value"


@pytest.mark.slow
def test_workers_of_ray_choose_the_same_samples(tmp_path: Path) -> None:
    run(tmp_path / "here", *WORDS, "run.max_steps=1")
    ranks = ("launcher=ray", "launcher.train_ranks=2", "launcher.cpus=0.1", "launcher.reward_cpus=0.1")
    with joined():
        run(tmp_path / "there", *WORDS, *ranks, "run.max_steps=1")
    here, there = (steps(tmp_path / name)[1] for name in ("here", "there"))
    for key in ("scouts/reward_mean", "scouts/rank_correlation", "reward_mean", "reward_std", "grad_norm"):
        # Each rank has half of the rows: fp32 sums in another order, relative to the size of the number.
        assert there[key] == pytest.approx(here[key], rel=1e-4, abs=1e-6), key
