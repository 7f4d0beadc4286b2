"""Which workers a run has, what they need, and how it is refused before anything starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import small_runs
from hypothesis import given, settings
from hypothesis import strategies as st
from unirl.core.errors import PlanRejected, RecipeError
from unirl.core.match.match import match
from unirl.core.specs.check import check_config
from unirl.core.specs.memory import RewardProcesses
from unirl.core.types.batch import rows_by_group
from unirl.launchers.ray.actors import Actor
from unirl.launchers.ray.carrier_choice import carrier_between, sender_of
from unirl.launchers.ray.cluster import Cluster
from unirl.launchers.ray.config import RayConfig
from unirl.launchers.ray.launcher import build as build_ray
from unirl.launchers.ray.placement import Node, WorkerPlace, by_machine, misfit, places, split_groups
from unirl.launchers.ray.shares import shares
from unirl.launchers.ray.worker import WorkerFacts
from unirl.loop.run import train

ON_CPU = [RewardProcesses(rewards=("a",), count=1, device="none")]
"""One reward worker."""


def node(name: str, cpus: float, gpus: float = 0.0) -> Node:
    return Node(name=name, cpus=cpus, gpus=gpus)


def test_trainside_has_no_rollout_workers_and_separate_has() -> None:
    config = RayConfig(train_ranks=2, rollout_workers=3)
    names = [place.name for place in places(config, on_cuda=False, rewards=ON_CPU)]
    assert names == ["train-0", "train-1", "reward-0"]
    names = [place.name for place in places(replace(config, placement="separate"), on_cuda=False, rewards=ON_CPU)]
    assert names == ["train-0", "train-1", "rollout-0", "rollout-1", "rollout-2", "reward-0"]


def test_colocated_workers_are_pairs_that_share_a_device_by_halves() -> None:
    config = RayConfig(placement="colocate", train_ranks=2, cpus=4, rollout_workers=7)
    result = [(p.name, p.device, p.cpus, p.gpus) for p in places(config, on_cuda=True, rewards=ON_CPU)]
    assert result == [
        ("train-0", 0, 2.0, 0.5),
        ("train-1", 1, 2.0, 0.5),
        ("rollout-0", 0, 2.0, 0.5),
        ("rollout-1", 1, 2.0, 0.5),
        ("reward-0", None, 0.5, 0.0),
    ]


def test_a_worker_has_the_devices_that_its_engine_splits_its_model_over() -> None:
    config = RayConfig(placement="separate", train_ranks=2, rollout_workers=2)
    assert [place.gpus for place in places(config, on_cuda=True, stages={"image": 4})] == [1, 1, 4, 4]
    # Without GPUs the engine makes its ranks of CPUs.
    assert [place.gpus for place in places(config, on_cuda=False, stages={"image": 4})] == [0] * 4
    # Workers of both stages have what the larger one needs; those of one have its own.
    stages = {"text": 2, "image": 4}
    assert [place.gpus for place in places(config, on_cuda=True, stages=stages)][2:] == [4, 4]
    apart = replace(config, stage_workers={"text": 1, "image": 1})
    assert {place.serves: place.gpus for place in places(apart, on_cuda=True, stages=stages)[2:]} == {
        ("text",): 2,
        ("image",): 4,
    }


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), ""),
        (("launcher.gpus=0.5",), "launcher.gpus: got 0.5 with engine.tensor_parallel=2, expected 1, or -1"),
        (
            ("launcher.placement=colocate", "engine.sleep_mode=true"),
            "engine.tensor_parallel: got 2 with launcher.placement=colocate, where a rollout worker has the device",
        ),
    ],
)
def test_an_engine_is_split_only_over_devices_that_its_worker_has(words: tuple[str, ...], expected: str) -> None:
    own = ("launcher=ray", "launcher.placement=separate", "engine=vllm-omni", "engine.tensor_parallel=2")
    plan = small_runs.plan(*own, *words)
    reasons = [str(reason) for reason in match(plan, catalog=small_runs.catalog()).reasons]
    assert [reason[: len(expected)] for reason in reasons] == ([expected] if expected else [])


@pytest.mark.parametrize(
    ("own", "gpus", "expected"),
    [
        ({}, {}, [(("shapes", "light", "size"), 0.25)] * 2),
        ({"light": 3}, {"light": 1}, [(("shapes", "size"), 0.25)] * 2 + [(("light",), 1.0)] * 3),
        # The others are one reward, which has the shared workers' GPUs all the same.
        (
            {"light": 1, "shapes": 1},
            {"shapes": 0},
            [(("size",), 0.25)] * 2 + [(("light",), 0.25), (("shapes",), 0.0)],
        ),
        (
            {"size": 1, "shapes": 1, "light": 1},
            {"light": 2},
            [(("size",), 0.25), (("shapes",), 0.25), (("light",), 2.0)],
        ),
    ],
)
@pytest.mark.parametrize("placement", ["trainside", "separate", "colocate"])
def test_rewards_without_dedicated_workers_share_the_others(
    placement: str, own: dict[str, int], gpus: dict[str, float], expected: list[tuple[tuple[str, ...], float]]
) -> None:
    config = RayConfig(
        placement=placement, reward_workers=2, reward_gpus=0.25, dedicated_rewards=own, dedicated_gpus=gpus
    )
    rewards = config.reward_processes(small_runs.plan("+reward@reward.size=jpeg-size"))
    result = [place for place in places(config, on_cuda=False, rewards=rewards) if place.role == "reward"]
    assert [(place.serves, place.gpus) for place in result] == expected
    assert [place.name for place in result] == [f"reward-{number}" for number in range(len(expected))]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("dedicated_rewards.lights=1", "no such reward; the rewards are 'shapes', 'light'; did you mean 'light'?"),
        ("dedicated_rewards.light=0", "got 0, expected 1 or more. Leave a reward out to share `reward_workers`."),
        ("dedicated_gpus.light=1", "this reward has no dedicated workers; set launcher.dedicated_rewards.light."),
    ],
)
def test_dedicated_workers_that_cannot_be_are_refused(word: str, said: str) -> None:
    plan = small_runs.plan("launcher=ray", f"+launcher.{word}")
    (reason,) = match(plan, catalog=small_runs.catalog()).reasons
    assert str(reason) == f"launcher.{word.partition('=')[0]}: {said}"


def test_a_pair_must_fit_on_one_machine() -> None:
    pairs = places(RayConfig(placement="colocate", train_ranks=2, cpus=2, reward_cpus=0), on_cuda=False)
    assert misfit(pairs, [node("a", 2), node("b", 2)]) == ""
    reply = (
        "workers 'train-1' and 'rollout-1' need 2 CPUs and 0 GPUs on one machine; "
        "the machines have a 1 CPUs 0 GPUs, b 1 CPUs 0 GPUs left."
    )
    assert misfit(pairs, [node("a", 3), node("b", 1)]) == reply


def test_machines_of_one_name_are_counted_singly() -> None:
    """Several Ray nodes may run on one host."""
    workers = places(RayConfig(train_ranks=2, cpus=2, reward_cpus=0), on_cuda=False)
    assert misfit(workers, [node("a", 2), node("a", 2)]) == ""


def test_a_worker_has_one_gpu_on_cuda_none_elsewhere_and_what_is_asked_for_always() -> None:
    assert [place.gpus for place in places(RayConfig(), on_cuda=True, rewards=ON_CPU)] == [1.0, 0.0]
    assert [place.gpus for place in places(RayConfig(), on_cuda=False, rewards=ON_CPU)] == [0.0, 0.0]
    own = [RewardProcesses(rewards=("a",), count=1, device="own", gpus=0.25)]
    assert [place.gpus for place in places(RayConfig(gpus=0.5), on_cuda=True, rewards=own)] == [0.5, 0.25]


@pytest.mark.parametrize(
    ("config", "nodes", "said"),
    [
        # 4 x 1 + 1 x 0.5 = 4.5 CPUs against 4.
        (
            RayConfig(train_ranks=4, reward_workers=1),
            [node("a", 4)],
            "4.5 CPUs are needed (4 train x 1 + 1 reward x 0.5); 4 are free (a 4).",
        ),
        # 2 x 1 + 3 x 0.5 = 3.5 GPUs against 2 + 1.
        (
            RayConfig(train_ranks=2, gpus=1, reward_gpus=0.5, reward_workers=3, cpus=0, reward_cpus=0),
            [node("a", 8, 2), node("b", 8, 1)],
            "3.5 GPUs are needed (2 train x 1 + 3 reward x 0.5); 3 are free (a 2, b 1).",
        ),
        # Together there is room for two workers of 0.75, but no GPU is left with as much.
        (
            RayConfig(train_ranks=3, gpus=0.75),
            [node("a", 8, 1), node("b", 8, 1.25)],
            "worker 'train-2' needs 1 CPUs and 0.75 GPUs on one machine; "
            "the machines have a 7 CPUs 0.25 GPUs, b 7 CPUs 0.5 GPUs left.",
        ),
        (RayConfig(), [], "1.5 CPUs are needed (1 train x 1 + 1 reward x 0.5); 0 are free (no machine)."),
    ],
)
def test_what_does_not_fit_is_refused_with_the_arithmetic(config: RayConfig, nodes: list[Node], said: str) -> None:
    assert misfit(places(config, on_cuda=False, rewards=config.reward_processes(small_runs.plan())), nodes) == said


@pytest.mark.parametrize(
    ("config", "nodes"),
    [
        (RayConfig(train_ranks=2, reward_workers=1), [node("a", 2.5)]),
        (RayConfig(train_ranks=2, reward_workers=2), [node("a", 1.5), node("b", 1.5)]),
        # 0.1 + 0.2 is more than 0.3 in floating point; the machine has room all the same.
        (RayConfig(cpus=0.1, reward_cpus=0.2), [node("a", 0.3)]),
        (RayConfig(train_ranks=4, gpus=0.25, cpus=0.5), [node("a", 8, 1)]),
    ],
)
def test_what_fits_to_the_last_fraction_is_taken(config: RayConfig, nodes: list[Node]) -> None:
    assert misfit(places(config, on_cuda=False, rewards=config.reward_processes(small_runs.plan())), nodes) == ""


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (RayConfig(placement="together"), "launcher.placement: got 'together', expected one of "),
        (RayConfig(carrier="pigeon"), "launcher.carrier: got 'pigeon', expected one of "),
        (RayConfig(train_ranks=0), "launcher.train_ranks: got 0, expected 1 or more."),
        (RayConfig(reward_cpus=-0.5), "launcher.reward_cpus: got -0.5, expected 0 or more."),
        (RayConfig(call_timeout_s=0), "launcher.call_timeout_s: got 0, expected more than 0."),
        (RayConfig(placement="colocate", gpus=2), "launcher.gpus: got 2; with colocate a train rank and"),
        (RayConfig(retries=-1), "launcher.retries: got -1, expected 0 or more."),
        (RayConfig(carrier="disk"), "launcher.carrier_dir: the carrier 'disk' needs a folder"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_their_key(config: RayConfig, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        build_ray(config)
    assert str(caught.value).startswith(said)


def test_the_defaults_are_accepted() -> None:
    check_config(RayConfig(), key="launcher")


@pytest.mark.parametrize(
    ("groups", "workers", "expected"),
    [
        ("aabbccdd", 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("abab", 2, [[0, 2], [1, 3]]),
        # Whole groups, as even in rows as that allows: 4 and 1 + 1 + 2.
        ("aaaabcdd", 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        # Fewer groups than workers: rows are distributed singly, where they are not units.
        ("aaa", 2, [[0, 1], [2]]),
        ("a", 3, [[0], [], []]),
    ],
)
def test_workers_get_whole_groups_as_evenly_as_that_allows(
    groups: str, workers: int, expected: list[list[int]]
) -> None:
    assert sorted(map(tuple, shares(groups, workers))) == sorted(map(tuple, expected))


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 9])
def test_groups_that_are_compared_as_a_whole_go_to_one_worker_however_many_there_are(workers: int) -> None:
    groups = ["a", "b", "a", "b", "a", "b"]
    partition = shares(groups, workers, whole_groups=True)
    assert len(partition) == workers
    assert sorted(row for rows in partition for row in rows) == [0, 1, 2, 3, 4, 5]
    for group in "ab":
        assert sum(any(groups[row] == group for row in rows) for rows in partition) == 1


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
def test_every_row_goes_to_just_one_worker(workers: int) -> None:
    groups = ["a"] * 5 + ["b"] + ["c"] * 3 + ["d"] * 2 + ["a"]
    assert sorted(row for rows in shares(groups, workers) for row in rows) == list(range(len(groups)))


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 50)), min_size=1, max_size=20),
    st.integers(1, 6),
    st.booleans(),
)
@settings(max_examples=200)
def test_every_row_goes_to_just_one_worker_with_its_unit(
    rows: list[tuple[int, int, int]], workers: int, is_text: bool
) -> None:
    """Units within groups; whole groups where there are enough of them."""
    groups = [f"g{group}" for group, _, _ in rows]
    units = list(rows_by_group([f"g{group}/{unit}" for group, unit, _ in rows]).values())
    costs = [cost for _, _, cost in rows] if is_text else None
    partition = shares(groups, workers, units=units, costs=costs)
    assert len(partition) == workers
    assert sorted(row for part in partition for row in part) == list(range(len(rows)))
    pieces = list(rows_by_group(groups).values()) if len(set(groups)) >= workers else units
    for piece in pieces:
        assert [set(piece) <= set(part) for part in partition].count(True) == 1
    if is_text:
        counts = [sum(set(piece) <= set(part) for piece in pieces) for part in partition]
        assert max(counts) - min(counts) <= 1
    elif len({len(piece) for piece in pieces}) == 1:
        sizes = [len(part) for part in partition]
        assert max(sizes) - min(sizes) <= len(pieces[0])


def test_texts_of_any_length_are_dealt_in_whole_groups_of_about_equal_cost() -> None:
    """Six groups of two: 100, 10, 10, 10, 10, 60 tokens, three for each rank; 120 and 80 is the best that there is."""
    groups = [f"g{group}" for group in range(6) for _ in range(2)]
    costs = [50, 50, 5, 5, 5, 5, 5, 5, 5, 5, 30, 30]
    partition = shares(groups, 2, costs=costs)
    assert sorted(sum(costs[row] for row in rows) for rows in partition) == [80, 120]
    assert all(len({groups[row] for row in rows}) == 3 for rows in partition)
    assert sorted(row for rows in partition for row in rows) == list(range(12))


@pytest.mark.slow
def test_a_run_that_does_not_fit_starts_no_worker_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cluster, "start", lambda *_: pytest.fail("workers were started"))
    folder = tmp_path / "run"
    expected = small_runs.plan(f"run.dir={folder}", "launcher=ray", "launcher.num_cpus=2", "launcher.train_ranks=3")
    with pytest.raises(PlanRejected, match=r"4\.5 CPUs are needed \(3 train x 1 \+ 3 reward x 0\.5\); 2 are free"):
        train(expected, catalog=small_runs.catalog())
    assert not folder.exists()
    assert not ray.is_initialized()


def started(name: str, host: str = "a", gpu: str = "", device: int | None = None) -> Actor:
    """A worker that runs, as messages and carriers know it."""
    role, index = name.split("-")
    place = WorkerPlace(name=name, role=role, index=int(index), cpus=1, gpus=float(bool(gpu)), device=device)
    facts = WorkerFacts(host=host, pid=7, device="cuda" if gpu else "cpu", gpu=gpu)
    return Actor(place=place, facts=facts)


@pytest.mark.parametrize(
    ("config", "hosts", "carrier"),
    [
        (RayConfig(), "aa", "shared-memory"),
        (RayConfig(), "ab", "ray"),
        (RayConfig(carrier_dir="/shared"), "ab", "disk"),
        (RayConfig(carrier="ray"), "aa", "ray"),
        (RayConfig(carrier="collective"), "ab", "collective"),
    ],
)
def test_weights_travel_by_what_reaches_every_worker(config: RayConfig, hosts: str, carrier: str) -> None:
    assert carrier_between(config, [started("train-0", hosts[0])], [started("rollout-0", hosts[1])]) == carrier


@pytest.mark.parametrize(
    ("carrier", "train", "rollout", "said"),
    [
        ("shared-memory", started("train-0", "a"), started("rollout-0", "b"), "the workers are on a, b. Use 'ray'"),
        (
            "collective",
            started("train-0", gpu="GPU-1"),
            started("rollout-0"),
            r"worker 'train-0' \(.*\) is on cuda, worker 'rollout-0' \(.*\) on cpu; .* Use 'auto'",
        ),
        (
            "collective",
            started("train-0", gpu="GPU-1"),
            started("rollout-0", gpu="GPU-1"),
            "share a GPU, and NCCL needs one GPU per rank. Use 'cuda-ipc'",
        ),
        (
            "cuda-ipc",
            started("train-0"),
            started("rollout-0"),
            r"worker 'train-0' \(.*\) is on cpu, and has no GPU memory to share. Use 'shared-memory'",
        ),
        (
            "cuda-ipc",
            started("train-0", gpu="GPU-1"),
            started("rollout-0", gpu="GPU-2"),
            "do not share a GPU. Use 'collective', or launcher.placement=colocate",
        ),
        (
            "cuda-ipc",
            started("train-0", "a", gpu="GPU-1"),
            started("rollout-0", "b", gpu="GPU-1"),
            "do not share a GPU",
        ),
    ],
)
def test_a_carrier_that_does_not_reach_a_worker_is_refused_with_the_way_out(
    carrier: str, train: Actor, rollout: Actor, said: str
) -> None:
    with pytest.raises(PlanRejected, match=f"launcher.carrier: got '{carrier}', but .*{said}"):
        carrier_between(RayConfig(carrier=carrier), [train], [rollout])


def test_train_ranks_of_one_machine_are_neighbours() -> None:
    """Ray starts actors where there is room, in any order."""
    asked = [started(f"train-{number}", host) for number, host in enumerate("babcab")]
    assert [actor.name for actor in by_machine(asked)] == [f"train-{n}" for n in (0, 2, 5, 1, 4, 3)]


def test_groups_that_reach_over_machines_are_told() -> None:
    ranks = by_machine([started(f"train-{number}", host) for number, host in enumerate("aabbbb")])
    assert list(split_groups(ranks, None)) == []
    assert list(split_groups(ranks, SimpleNamespace(sequence=2, tensor=1))) == []
    (text,) = split_groups(ranks, SimpleNamespace(sequence=3, tensor=1))
    assert text.startswith("backend.mesh.sequence: 1 of 2 groups of 3 ranks are on several machines, such as a, b.")


def test_within_a_gpu_each_train_rank_sends_to_the_worker_beside_it() -> None:
    train = [started(f"train-{n}", gpu=f"GPU-{n}", device=n) for n in (0, 1)]
    rollout = [started(f"rollout-{n}", gpu=f"GPU-{n}", device=n) for n in (0, 1)]
    assert carrier_between(RayConfig(carrier="cuda-ipc", placement="colocate"), train, rollout) == "cuda-ipc"
    assert [sender_of(actor, "cuda-ipc", train) for actor in rollout] == train
    # By other ways the weights of rank 0 are enough.
    assert [sender_of(actor, "shared-memory", train) for actor in rollout] == [train[0]] * 2


def test_ranks_that_cannot_share_rows_evenly_are_refused_before_anything_starts() -> None:
    plan = small_runs.plan("launcher=ray", "launcher.train_ranks=3", "backend.mesh.tensor=2")
    reasons = [str(reason) for reason in match(plan, catalog=small_runs.catalog()).reasons]
    assert any(
        reason.startswith("launcher.train_ranks: got 3, expected a multiple of the 2 ranks") for reason in reasons
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run.device=cpu",), "run.device is 'cpu', so there is no GPU memory to share. Use 'shared-memory'."),
        (("run.device=cuda",), "each worker has its own GPU. Use 'collective', or launcher.placement=colocate."),
    ],
)
def test_memory_of_a_gpu_that_nobody_shares_is_refused_before_anything_starts(
    words: tuple[str, ...], said: str
) -> None:
    expected = small_runs.plan("launcher=ray", "launcher.placement=separate", "launcher.carrier=cuda-ipc", *words)
    verdict = match(expected, catalog=small_runs.catalog())
    (reason,) = [str(reason) for reason in verdict.reasons if "launcher.carrier" in str(reason)]
    assert reason.startswith("launcher.carrier: got 'cuda-ipc', but ") and reason.endswith(said)
