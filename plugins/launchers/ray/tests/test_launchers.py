"""The same recipe in one process, on several ranks and with workers apart: same numbers, also over a resume."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import ray
from fault_runs import full_object_store, strike
from launched import BAR, COLOCATE, KL_HORIZON, KL_TARGET, RANKS, SEPARATE, assert_same_run
from small_runs import EVALUATED, SMALL, catalog, copy_up_to, events, plan, run, steps
from unirl.core.errors import PlanRejected
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.files import plugin_files
from unirl.core.recipe.compose import compose
from unirl.loop.run import train

# The runs that the tests compare are made in one fixture, which counts as part of the first test.
pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(900)]

ADAPTIVE_KL = (
    "backend.reference_copy=true",
    "algorithm.kl_coef=0.5",
    # About what it measures: within a fifth of it the coefficient depends on every digit of the divergence.
    f"algorithm.kl_target={KL_TARGET}",
    f"algorithm.kl_horizon={KL_HORIZON}",
)
"""State of the algorithm, which the driver decides, the ranks use and a resume continues with."""
# An element of Adam's step is lr g / (|g| + eps): with the usual eps of 1e-8 the rounding of a gradient near 0 decides its
# sign, and eight updates may differ by 8 lr. With eps they differ by lr / eps of the rounding, see `BAR`.
WHOLE = ("run.max_steps=4", "run.save_every=2", "backend.eps=1e-3", *ADAPTIVE_KL)

GAP = 5e-6
"""Log-probs of a rollout against those of a replay in batches of another size.

A step's is a mean over D = 1024 elements and at most 2: log2(D) = 10 additions and four roundings before them, each of
6e-8 of it, on both sides: 2 * 14 * 6e-8 * 2 = 3.4e-6. That the velocity rounds by 1e-5 of a standard deviation shows as
1e-5 / sqrt(D) = 3e-7 besides.
"""


@pytest.fixture(scope="module")
def whole(no_batch_invariance: str) -> tuple[str, ...]:
    """Four steps, batch-invariant where this machine can."""
    return (*WHOLE, f"run.batch_invariant={'false' if no_batch_invariance else 'true'}")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, ray_here: None, whole: tuple[str, ...]) -> dict[str, Path]:
    """Four steps each way."""
    folder = tmp_path_factory.mktemp("runs")
    ways = {
        "local": ("launcher=local",),
        "ray-1": RANKS[1],
        "ray-2": RANKS[2],
        "separate": SEPARATE,
        "colocate": COLOCATE,
    }
    return {name: run(folder / name, *whole, *words).folder for name, words in ways.items()}


@pytest.mark.parametrize("way", ["ray-1", "ray-2", "separate", "colocate"])
def test_losses_rewards_and_weights_are_those_of_one_process(runs: dict[str, Path], way: str) -> None:
    # One rank adds in the order of one process: bit for bit.
    assert_same_run(runs["local"], runs[way], within=0.0 if way == "ray-1" else BAR)


WAYS = pytest.mark.parametrize("way", ["local", "ray-1", "ray-2", "separate", "colocate"])


@WAYS
def test_rollout_and_replay_agree_on_every_log_prob(runs: dict[str, Path], way: str) -> None:
    assert max(numbers["logp_mismatch_max"] for numbers in steps(runs[way]).values()) <= GAP


@WAYS
@pytest.mark.batch_invariant
def test_rollout_and_replay_agree_on_every_bit(runs: dict[str, Path], way: str) -> None:
    assert [numbers["logp_mismatch_max"] for numbers in steps(runs[way]).values()] == [0.0] * 4


@pytest.mark.batch_invariant
def test_a_rollout_that_workers_share_is_that_of_one_process_to_the_last_bit(runs: dict[str, Path]) -> None:
    assert_same_run(runs["local"], runs["separate"], within=0.0)


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 2)])
def test_two_steps_and_two_after_a_resume_equal_four(
    runs: dict[str, Path], whole: tuple[str, ...], tmp_path: Path, before: int, after: int
) -> None:
    folder = copy_up_to(runs[f"ray-{before}"], 2, tmp_path / "resumed")
    assert run(folder, *whole, *RANKS[after], resume=folder).status == "done"
    # The same ranks add the same numbers in the same order. Other ranks add the shares of a gradient in another one.
    assert_same_run(runs[f"ray-{before}"], folder, within=0.0 if before == after else BAR)


@pytest.mark.parametrize("carrier", ["collective", "ray"])
def test_weights_by_other_carriers_give_the_numbers_of_shared_memory_also_when_a_receiver_is_replaced(
    runs: dict[str, Path], whole: tuple[str, ...], tmp_path: Path, carrier: str
) -> None:
    """The second sync is struck: of a broadcast the first one goes through the group of the start, the rest through
    another one."""
    with strike("rollout", "sync", index=1) as struck:
        folder = run(tmp_path / "run", *whole, *SEPARATE, "run.stop_at=2", f"launcher.carrier={carrier}").folder
    (finding,) = events(folder, "finding")
    assert f"worker 'rollout-1' (host {os.uname().nodename}, process {struck.pid}) died" in finding["text"]
    assert_same_run(runs["separate"], folder, within=0.0, last=2)
    # Every tensor to each of two workers, as by any other carrier.
    assert steps(folder)[2]["sync/tensors"] == steps(runs["separate"])[2]["sync/tensors"]


def test_where_the_object_store_is_full_ray_goes_by_files_and_the_numbers_stay(
    runs: dict[str, Path], whole: tuple[str, ...], tmp_path: Path
) -> None:
    with full_object_store(at_sync=1) as sizes:
        folder = run(tmp_path / "run", *whole, *SEPARATE, "run.stop_at=2", "launcher.carrier=ray").folder
    # The store of these tests has 128 MiB.
    assert sum(sizes) > 128 * 2**20
    assert_same_run(runs["separate"], folder, within=0.0, last=2)


def test_workers_apart_are_evaluated_with_the_policy_that_is_asked_for(tmp_path: Path, ray_here: None) -> None:
    words = (
        *EVALUATED,
        "run.max_steps=2",
        "eval.every=1",
        "eval.policy=ema",
        "backend.ema.kind=constant",
        "backend.ema.decay=0.5",
    )
    result = {name: run(tmp_path / name, *words, *way).folder for name, way in (("here", ()), ("there", SEPARATE))}
    scores = {
        name: [e["metrics"]["score_mean"] for e in events(folder, "evaluated")] for name, folder in result.items()
    }
    # Before the first step, after it, and at the end; the average has moved in between.
    assert len(set(scores["here"])) == 3
    assert scores["there"] == pytest.approx(scores["here"], rel=0, abs=1e-5)
    # And it trains with rollouts of the live weights again.
    assert max(numbers["logp_mismatch_max"] for numbers in steps(result["there"]).values()) <= GAP


def test_groups_with_steps_of_their_own_come_together_from_several_workers(tmp_path: Path, ray_here: None) -> None:
    """Two of four steps for each group; with this seed one worker's groups store five positions at most, the other's
    four."""
    words = ("run.max_steps=1", "run.seed=1", "sampling.sde={mode: random, last: 1.0, count: 2, per_group: true}")
    result = {name: run(tmp_path / name, *words, *way).folder for name, way in (("here", ()), ("there", SEPARATE))}
    for key in ("loss", "reward_mean", "grad_norm"):
        assert steps(result["there"])[1][key] == pytest.approx(steps(result["here"])[1][key], rel=1e-5, abs=BAR), key


@pytest.mark.parametrize("words", [RANKS[2], (*RANKS[2], "launcher.placement=separate")], ids=["trainside", "separate"])
def test_ranks_that_split_layers_get_the_same_rows(runs: dict[str, Path], tmp_path: Path, words: Sequence[str]) -> None:
    words = (*WHOLE, "run.max_steps=1", *words, "backend.mesh.tensor=2")
    folder = run(tmp_path / "run", *words).folder
    expected, result = steps(runs["local"])[1], steps(folder)[1]
    # Split layers add their halves of a sum, whose terms are of order 1 and which fp32 rounds to 6e-8, in each block.
    assert expected["loss"] == pytest.approx(result["loss"], rel=0, abs=BAR)
    assert expected["grad_norm"] == pytest.approx(result["grad_norm"], rel=1e-4)


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
    expected = plan(
        f"run.dir={tmp_path / 'run'}", "launcher=ray", f"+launcher.environment={{PYTHONPATH: '{info.parent}'}}"
    )
    reply = (
        rf"machine '{os.uname().nodename}' \(node [0-9a-f]{{8}}\) has other packages than the driver: "
        r"unirl-backend-fsdp2: got 9\.9\.9"
    )
    with pytest.raises(PlanRejected, match=reply):
        train(expected, catalog=catalog())
    assert not (tmp_path / "run").exists()
    assert ray.is_initialized()


NIGHT = """
import os
from dataclasses import dataclass
from pathlib import Path
from unirl.core.plugins.hookspec import hookimpl
from unirl.core.roles import Scores
from unirl.core.specs.part_config import RewardConfig
from unirl.core.specs.spec import RewardSpec

@dataclass
class NightConfig(RewardConfig):
    limit: float = 1.0

class Night:
    def __init__(self, limit):
        self.limit = limit

    def score(self, samples):
        return Scores(values=(1 - samples.media.stacked.mean(dim=(1, 2, 3)) / self.limit).clamp(min=0))

    def close(self):
        pass

def build(config, *, device):
    with Path(__file__).with_name("built.txt").open("a") as log:
        log.write(f"night {os.getpid()}\\n")
    return Night(config.limit)

@hookimpl
def unirl_rewards():
    own = {"build": f"{__name__}:build", "config": f"{__name__}:NightConfig"}
    return [RewardSpec(name="night", summary="s", scale="0 to 1", range=(0.0, 1.0), media="image", **own)]
"""
RED = """
import os
from pathlib import Path

with Path(__file__).with_name("built.txt").open("a") as log:
    log.write(f"mine {os.getpid()}\\n")

def score(images, color):
    return [sum(i.getpixel((32, 32))) * (c == 'red') for i, c in zip(images, color)]
"""


def test_workers_use_plugin_files_and_functions_of_the_driver(
    tmp_path: Path, ray_here: None, whole: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are found by paths relative to the driver's folder, which is not that of the workers. With dedicated
    workers each of them builds one reward and runs its file once, while samples are scored as others are generated."""
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "planted_night.py").write_text(NIGHT)
    (tmp_path / "mine.py").write_text(RED)
    monkeypatch.chdir(tmp_path)
    seen = Catalog.discover(files=plugin_files(Path("plugins")))
    rewards = ("+reward@reward.night=night", "+reward@reward.mine=function", "reward.mine.target=mine.py:score")
    own = ("+launcher.dedicated_rewards={night: 2, mine: 1}", "launcher.reward_cpus=0.1")
    ways = {
        "local": ("launcher=local",),
        "dedicated": (*RANKS[1], *own, "run.reward_overlap_groups=2"),
        "separate": SEPARATE,
    }
    logs = (tmp_path / "plugins" / "built.txt", tmp_path / "built.txt")
    numbers: list[dict[str, float]] = []
    built: dict[str, list[list[str]]] = {}
    for name, way in ways.items():
        words = (*SMALL, *whole, "run.max_steps=1", *rewards, *way, f"run.dir={name}")
        numbers.append(steps(train(compose("quickstart", words, catalog=seen), catalog=seen).folder)[1])
        built[name] = [line.split() for path in logs if path.exists() for line in path.read_text().splitlines()]
        for path in logs:
            path.unlink(missing_ok=True)
    expected = {key: value for key, value in numbers[0].items() if key.startswith("reward")}
    assert expected["reward/night"] > 0 and expected["reward/mine"] > 0
    # Two workers of one reward and one of the other, none of them in another process's company.
    assert sorted(kind for kind, _ in built["dedicated"]) == ["mine", "night", "night"]
    assert len({pid for _, pid in built["dedicated"]}) == 3
    # Shared workers build both.
    assert len(built["separate"]) == 4 and len({pid for _, pid in built["separate"]}) == 2
    assert numbers[1]["reward_queue_max"] >= 1
    for result in numbers[1:]:
        assert {key: result[key] for key in expected} == pytest.approx(expected, rel=1e-5)
    monkeypatch.delitem(sys.modules, "planted_night")
