"""The same recipe in one process, on several ranks and with workers apart: same numbers, also over a resume."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import ray
import torch
from fault_runs import full_object_store, strike
from small_runs import catalog, copy_up_to, events, plan, run, steps, tensors
from unirl.core.errors import PlanRejected
from unirl.core.run import train

pytestmark = pytest.mark.slow

RANKS = {1: ("launcher=ray",), 2: ("launcher=ray", "launcher.train_ranks=2")}
SEPARATE = ("launcher=ray", "launcher.placement=separate", "launcher.rollout_workers=2", "launcher.reward_workers=2")
COLOCATE = ("launcher=ray", "launcher.placement=colocate", "launcher.train_ranks=2", "launcher.carrier=ray")
ADAPTIVE_KL = (
    "backend.reference_copy=true",
    "algorithm.kl_coef=0.5",
    # About what it measures: within a fifth of it the coefficient depends on every digit of the divergence.
    "algorithm.kl_target=2e-3",
    "algorithm.kl_horizon=80",
)
"""A state of the algorithm, which the driver decides, the ranks use and a resume goes on with."""
WHOLE = ("run.steps=4", "run.save_every=1", *ADAPTIVE_KL)

BAR = 1e-6
"""Losses and weights are of order 1 and below; fp32 rounds those to 6e-8, and ranks add in another order."""

NUMBERS = ("loss", "reward_mean", "reward_std", "ratio_max_dev_first", "kl", "kl_coef")
JUDGED = ("loss", "critic_loss", "critic_grad_norm", "explained_variance", "returns_mean", "reward_mean", "kl")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, ray_here: None) -> dict[str, Path]:
    """Four steps each way."""
    folder = tmp_path_factory.mktemp("runs")
    ways = {
        "local": ("launcher=local",),
        "ray-1": RANKS[1],
        "ray-2": RANKS[2],
        "separate": SEPARATE,
        "colocate": COLOCATE,
    }
    return {name: run(folder / name, *WHOLE, *words).folder for name, words in ways.items()}


def assert_same_run(left: Path, right: Path, *, within: float, last: int = 4, numbers: Sequence[str] = NUMBERS) -> None:
    """Numbers of every step, and everything that is saved of the last one; `within` 0 is bit for bit."""
    both = steps(left), steps(right)
    assert [sorted(found)[:last] for found in both] == [list(range(1, last + 1))] * 2
    for step in range(1, last + 1):
        for key in numbers:
            assert both[0][step][key] == pytest.approx(both[1][step][key], rel=0, abs=within), (step, key)
    wanted, found = tensors(left, last), tensors(right, last)
    assert wanted.keys() == found.keys()
    assert any(isinstance(value, torch.Tensor) for value in wanted.values())
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[name], value, rtol=0, atol=within, msg=lambda m, n=name: f"{n}: {m}")
        else:
            assert found[name] == value, name


@pytest.mark.parametrize("way", ["ray-1", "ray-2", "separate", "colocate"])
def test_losses_rewards_and_weights_are_those_of_one_process(runs: dict[str, Path], way: str) -> None:
    # One rank adds in the order of one process: bit for bit.
    assert_same_run(runs["local"], runs[way], within=0.0 if way == "ray-1" else BAR)


@pytest.mark.parametrize("way", ["local", "ray-1", "ray-2", "separate", "colocate"])
def test_rollout_and_replay_agree_on_every_log_prob(runs: dict[str, Path], way: str) -> None:
    assert [numbers["logp_gap_max"] for numbers in steps(runs[way]).values()] == [0.0] * 4


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 1), (1, 2)])
def test_two_steps_and_two_after_a_resume_equal_four(
    runs: dict[str, Path], tmp_path: Path, before: int, after: int
) -> None:
    folder = copy_up_to(runs[f"ray-{before}"], 2, tmp_path / "resumed")
    assert run(folder, *WHOLE, *RANKS[after], resume=folder).status == "done"
    # The same ranks add the same numbers in the same order. Other ranks add the shares of a gradient in another one.
    assert_same_run(runs[f"ray-{before}"], folder, within=0.0 if before == after else BAR)


def test_weights_by_broadcast_give_the_numbers_of_shared_memory_also_when_a_receiver_is_replaced(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    """The second sync is struck: the first one goes through the group of the start, the rest through another one."""
    with strike("rollout", "sync", index=1) as struck:
        folder = run(tmp_path / "run", *WHOLE, *SEPARATE, "run.stop_at=2", "launcher.carrier=collective").folder
    (finding,) = events(folder, "finding")
    assert f"worker 'rollout-1' (host {os.uname().nodename}, process {struck.pid}) died" in finding["text"]
    assert_same_run(runs["separate"], folder, within=0.0, last=2)
    # Every tensor to each of two workers, as by any other carrier.
    assert steps(folder)[2]["sync/tensors"] == steps(runs["separate"])[2]["sync/tensors"]


def test_where_the_object_store_is_full_ray_goes_by_files_and_the_numbers_stay(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    with full_object_store(at_sync=1) as sizes:
        folder = run(tmp_path / "run", *WHOLE, *SEPARATE, "run.stop_at=2", "launcher.carrier=ray").folder
    # The store of these tests has 128 MiB.
    assert sum(sizes) > 128 * 2**20
    assert_same_run(runs["separate"], folder, within=0.0, last=2)


def test_workers_apart_are_evaluated_with_the_policy_that_is_asked_for(tmp_path: Path, ray_here: None) -> None:
    words = ("run.steps=2", "eval.every=1", "eval.policy=ema", "backend.ema.kind=constant", "backend.ema.decay=0.5")
    found = {name: run(tmp_path / name, *words, *way).folder for name, way in (("here", ()), ("there", SEPARATE))}
    scores = {name: [e["metrics"]["score_mean"] for e in events(folder, "evaluated")] for name, folder in found.items()}
    # Before the first step, after it, and at the end; the average has moved in between.
    assert len(set(scores["here"])) == 3
    assert scores["there"] == pytest.approx(scores["here"], rel=0, abs=1e-5)
    # And it trains with rollouts of the live weights again.
    assert [numbers["logp_gap_max"] for numbers in steps(found["there"]).values()] == [0.0] * 2


def test_groups_with_steps_of_their_own_come_together_from_several_workers(tmp_path: Path, ray_here: None) -> None:
    """Two of four steps for each group; with this seed one worker's groups store five positions at most, the other's
    four."""
    words = ("run.steps=1", "run.seed=1", "sampling.sde={mode: random, last: 1.0, count: 2, per_group: true}")
    found = {name: run(tmp_path / name, *words, *way).folder for name, way in (("here", ()), ("there", SEPARATE))}
    for key in ("loss", "reward_mean", "grad_norm"):
        assert steps(found["there"])[1][key] == pytest.approx(steps(found["here"])[1][key], rel=1e-5, abs=BAR), key


@pytest.mark.parametrize("words", [RANKS[2], (*RANKS[2], "launcher.placement=separate")], ids=["trainside", "separate"])
def test_ranks_that_split_layers_get_the_same_rows(runs: dict[str, Path], tmp_path: Path, words: Sequence[str]) -> None:
    folder = run(tmp_path / "run", "run.steps=1", *ADAPTIVE_KL, *words, "backend.mesh.tensor=2").folder
    wanted, found = steps(runs["local"])[1], steps(folder)[1]
    # Split layers add their halves of a sum, whose terms are of order 1 and which fp32 rounds to 6e-8, in each block.
    assert wanted["loss"] == pytest.approx(found["loss"], rel=0, abs=BAR)
    assert wanted["grad_norm"] == pytest.approx(found["grad_norm"], rel=1e-4)


def test_a_critic_on_two_ranks_is_that_of_one_process(tmp_path: Path, ray_here: None) -> None:
    """PPO over texts: the ranks whiten advantages together, and step policy and critic alike."""
    words = (
        "algorithm=ppo", "run.steps=2", "run.save_every=1", "algorithm.kl_coef=0.1", "backend.reference_copy=true",
        # With eps 1 a step of Adam is linear in the gradient, which ranks add up in another order.
        "backend.eps=1", "backend.lr=1e-2", "backend.critic.lr=1e-2",
    )  # fmt: skip
    ways = {"here": ("launcher=local",), "there": RANKS[2]}
    found = {name: run(tmp_path / name, *words, *way, recipe="quickstart-text").folder for name, way in ways.items()}
    assert_same_run(found["here"], found["there"], within=BAR, last=2, numbers=JUDGED)
    assert any(name.startswith("critic/") for name in tensors(found["there"], 2))


def test_no_worker_is_left_after_a_run(runs: dict[str, Path]) -> None:
    del runs
    end = time.monotonic() + 10
    while (left := ray.util.list_named_actors(all_namespaces=True)) and time.monotonic() < end:
        time.sleep(0.1)
    assert left == []


def test_a_machine_with_other_versions_is_refused_by_name(ray_here: None, tmp_path: Path) -> None:
    """A dist that claims another version, put before the real one on the workers' path."""
    del ray_here
    info = tmp_path / "path" / "unirl_backend_fsdp2-9.9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: unirl-backend-fsdp2\nVersion: 9.9.9\n")
    wanted = plan(
        f"run.dir={tmp_path / 'run'}", "launcher=ray", f"+launcher.environment={{PYTHONPATH: '{info.parent}'}}"
    )
    said = rf"machine '{os.uname().nodename}' \(node [0-9a-f]{{8}}\) does not fit the driver: unirl-backend-fsdp2 \S+ is wanted, 9\.9\.9 is"
    with pytest.raises(PlanRejected, match=said):
        train(wanted, catalog=catalog())
    assert not (tmp_path / "run").exists()
    assert ray.is_initialized()
