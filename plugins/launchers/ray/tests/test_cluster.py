"""Several machines, simulated as Ray nodes on this one: a run over them, a look at them, and one that does not fit."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import ray
import ray_clusters
from click.testing import CliRunner
from ray.cluster_utils import Cluster
from small_runs import catalog, plan, run, steps, tensors
from unirl.core.errors import PlanRejected, PluginNotInstalled, RunFolderError
from unirl.core.plugins.catalog import Catalog
from unirl.launchers.ray import launcher
from unirl.launchers.ray.ray_worker import SETTINGS
from unirl.loop.run import train
from unirl.tools.doctor import look_at_cluster
from unirl.tools.doctor_command import command as doctor

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

TWO_STEPS = ("run.max_steps=2", "data.prompts_per_step=3")
# Each machine has two CPUs and each rank takes two, so every rank is on a separate machine.
SPREAD = ("launcher.train_ranks=3", "launcher.cpus=2", "launcher.reward_cpus=0")


LIGHT = """
import os
from pathlib import Path
from PIL import ImageStat

with Path(__file__).with_name("gpus.txt").open("a") as log:
    log.write(os.environ.get("CUDA_VISIBLE_DEVICES", "") + "\\n")

def light(images):
    return [round(ImageStat.Stat(image).mean[0] / 255, 2) for image in images]
"""


@pytest.fixture(scope="module")
def machines() -> Iterator[Cluster]:
    before = dict(os.environ)
    os.environ.update({**SETTINGS, **ray_clusters.STARTED_WITH})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cluster = Cluster()
        try:
            for _ in range(3):
                cluster.add_node(num_cpus=2, object_store_memory=100 * 2**20, include_dashboard=False)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
            os.environ.clear()
            os.environ.update(before)


def test_three_machines_train_as_one_process_does(machines: Cluster, tmp_path: Path) -> None:
    """And a fourth one with two GPUs scores: each of the reward's two workers sees one of them."""
    (tmp_path / "light.py").write_text(LIGHT)
    own = (
        "run.device=cpu",
        "+reward@reward.own=function",
        "reward.own.weight=0",
        f"reward.own.target={tmp_path}/light.py:light",
    )
    words = ("launcher=ray", f"launcher.address={machines.address}", *SPREAD)
    gpus = machines.add_node(num_cpus=0, num_gpus=2, object_store_memory=100 * 2**20, include_dashboard=False)
    try:
        dedicated = ("+launcher.dedicated_rewards.own=2", "+launcher.dedicated_gpus.own=1")
        there = run(tmp_path / "there", *TWO_STEPS, *own, *words, *dedicated).folder
    finally:
        machines.remove_node(gpus)
    seen = (tmp_path / "gpus.txt").read_text().splitlines()
    assert sorted(seen) == ["0", "1"]
    here = run(tmp_path / "here", *TWO_STEPS, *own).folder
    assert not ray.is_initialized()
    for step in (1, 2):
        for key in ("loss", "reward_mean", "grad_norm", "reward/own"):
            # Three ranks add the shares of a gradient in another order; fp32 rounds numbers of order 1 to 6e-8.
            assert steps(there)[step][key] == pytest.approx(steps(here)[step][key], rel=1e-5, abs=1e-6)
    result = tensors(there, 2)
    for name, value in tensors(here, 2).items():
        if name.startswith("/weights"):
            # Adam divides by the size of a gradient: where that is near 0, its rounding becomes a share of the
            # learning rate, 1e-4. Other rows would move a weight by all of it.
            assert value.sub(result[name]).abs().max() <= 5e-6, name


def test_what_does_not_fit_on_any_machine_is_refused_with_what_each_has(
    machines: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the cluster that Ray's own variable names."""
    monkeypatch.setenv("RAY_ADDRESS", machines.address)
    words = ("launcher=ray", "launcher.cpus=3", "launcher.reward_cpus=0")
    with pytest.raises(
        PlanRejected, match=r"worker 'train-0' needs 3 CPUs and 0 GPUs on one machine; the machines have .* 2 CPUs"
    ):
        run(tmp_path / "run", *words)


def test_a_look_at_machines_that_agree_finds_nothing(machines: Cluster) -> None:
    here = json.loads(CliRunner().invoke(doctor, ["--json"]).stdout)
    there = json.loads(CliRunner().invoke(doctor, ["--json", "--cluster", machines.address]).stdout)
    assert there["findings"] == here["findings"]
    assert [machine["cpus"] for machine in there["machines"]] == [2, 2, 2]
    assert len({machine["name"] for machine in there["machines"]}) == 3
    assert all(machine["port"] > 0 for machine in there["machines"])
    assert all(machine["dists"]["unirl-core"] == version("unirl-core") for machine in there["machines"])


FAULTS = """
import os, sys, time

now, statvfs = time.time, os.statvfs
time.time = lambda: now() - 3600

def small(path):
    result = list(statvfs(path))
    if str(path) == "/dev/shm":
        result[2] = 2**26 // result[1]
    return os.statvfs_result(result)

os.statvfs = small
"""


def test_a_broken_machine_is_named_with_each_of_its_faults(machines: Cluster, tmp_path: Path) -> None:
    """Its clock is an hour late, its shared memory 64 MiB, its GPUs are not there, its network interface neither."""
    (tmp_path / "sitecustomize.py").write_text(FAULTS)
    odd = machines.add_node(
        num_cpus=2,
        num_gpus=2,
        object_store_memory=100 * 2**20,
        include_dashboard=False,
        env_vars={"PYTHONPATH": str(tmp_path), "GLOO_SOCKET_IFNAME": "absent0"},
    )
    try:
        texts = {finding.check: finding.text for finding in look_at_cluster(catalog(), machines.address).findings}
    finally:
        machines.remove_node(odd)
    name = f"machine {os.uname().nodename!r} (node {odd.node_id[:8]})"
    assert texts.keys() == {"clock", "memory", "device", "group"}
    assert texts["clock"].startswith(f"{name}: its clock is 3600 s behind this one's")
    assert texts["memory"].startswith(f"{name}: /dev/shm has 64 MiB")
    assert texts["device"].startswith(f"{name} offers 2 GPUs to Ray; torch finds no CUDA device")
    assert name.removeprefix("machine ") in texts["group"]
    assert "GLOO_SOCKET_IFNAME" in texts["group"]


def test_a_run_folder_that_a_machine_does_not_share_is_refused_at_the_start(
    machines: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fourth machine has another disk at the place of the run folder."""
    monkeypatch.setattr(launcher, "SHOWN_WITHIN_S", 1.0)
    own = ["mount", "-t", "tmpfs", "none", str(tmp_path)]
    if subprocess.run(["unshare", "--mount", *own], check=False, capture_output=True).returncode:
        pytest.skip("mounts in a namespace of its own need more rights than this process has")
    node = f"{shlex.join(own)} && exec ray start --address={machines.address} --num-cpus=3 --block"
    process = subprocess.Popen(["unshare", "--mount", "sh", "-c", node], stdout=subprocess.DEVNULL)
    try:
        # Only the fourth machine has three CPUs.
        words = ("launcher=ray", f"launcher.address={machines.address}", "launcher.cpus=3", "launcher.reward_cpus=0")
        end = time.monotonic() + 60
        while sum(node["Alive"] for node in machines.global_state.node_table()) < 4:
            assert process.poll() is None and time.monotonic() < end, "the fourth machine does not start"
            time.sleep(0.2)
        with pytest.raises(
            RunFolderError, match=r"run\.dir: .*/run is another folder for worker 'train-0' .*, or none"
        ):
            run(tmp_path / "run", *TWO_STEPS, *words)
    finally:
        process.terminate()
        process.wait(30)


def test_without_a_launcher_that_knows_machines_the_way_out_is_said() -> None:
    with pytest.raises(PluginNotInstalled, match="pip install unirl-launcher-ray"):
        look_at_cluster(Catalog.of({}), "auto")


def test_a_machine_with_another_version_is_refused_by_name(machines: Cluster, tmp_path: Path) -> None:
    """The fourth machine has a dist that claims another version, before the real one on its path."""
    info = tmp_path / "path" / "unirl_backend_fsdp2-9.9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: unirl-backend-fsdp2\nVersion: 9.9.9\n")
    odd = machines.add_node(
        num_cpus=2,
        object_store_memory=100 * 2**20,
        include_dashboard=False,
        env_vars={"PYTHONPATH": str(info.parent)},
    )
    name = rf"'{os.uname().nodename}' \(node {odd.node_id[:8]}\)"
    words = (*TWO_STEPS, *SPREAD, "launcher=ray", f"launcher.address={machines.address}", "launcher.train_ranks=4")
    reply = rf"machine {name} has other packages than the driver: unirl-backend-fsdp2: got 9\.9\.9, expected "
    with pytest.raises(PlanRejected, match=reply):
        train(plan(f"run.dir={tmp_path / 'run'}", *words), catalog=catalog())
    assert not (tmp_path / "run").exists()
    (finding,) = look_at_cluster(catalog(), machines.address).findings
    assert finding.check == "version"
    assert f"(node {odd.node_id[:8]}): unirl-backend-fsdp2 " in finding.text
    assert "9.9.9 there" in finding.text
    machines.remove_node(odd)
