"""The Slurm script that the page shows, with Ray and training for real and `srun` and `scontrol` replaced; and its
manifests of Kubernetes, which are read."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from pages import ROOT
from small_runs import SMALL, catalog, events
from unirl.core.match.match import match
from unirl.core.recipe.compose import compose

PAGE = (ROOT / "docs" / "how-to" / "slurm-and-kubernetes.md").read_text(encoding="utf-8")
STEPS = 40


def shown(name: str) -> str:
    found = re.search(rf"<!-- {name}: begin -->\n```\w+\n(.*?)```", PAGE, flags=re.DOTALL)
    assert found is not None, name
    return found[1]


def once(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, old
    return text.replace(old, new)


def free_port() -> int:
    with socket.create_server(("", 0)) as listener:
        return listener.getsockname()[1]


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def job(tmp_path: Path) -> list[str]:
    """The script of a job of two nodes, both of which are this machine, ready to be queued and queued again."""
    (recipe,) = re.findall(r"^train=\(unirl (.*)\)$", shown("script"), flags=re.MULTILINE)
    small = ("launcher=ray", "launcher.train_ranks=2", "launcher.reward_cpus=0", f"run.max_steps={STEPS}", *SMALL)
    script = once(shown("script"), recipe, shlex.join(["train", "quickstart", *small]))
    # Not Ray's usual port: another cluster may have it.
    assert "6379" in script
    (tmp_path / "job.sh").write_text(script.replace("6379", str(free_port())))
    executable(tmp_path / ".venv" / "bin" / "activate", f"export PATH={Path(sys.executable).parent}:$PATH")
    executable(tmp_path / "bin" / "srun", 'while [ "$1" != ray ]; do shift; done; exec "$@"')
    executable(tmp_path / "bin" / "scontrol", 'echo "$@" >>requeued.txt')
    return ["bash", "job.sh"]


def steps_of(folder: Path) -> list[int]:
    run = folder / "runs" / "7"
    return [event["step"] for event in events(run, "step")] if (run / "events.jsonl").exists() else []


# Two clusters are started, one after the other, each with two nodes and Ray's dashboard.
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_job_that_is_signalled_is_queued_again_and_resumes(
    job: list[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    # Ray notes the address of a cluster there, and others would look for this one. Paths of its sockets must be short.
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    request.addfinalizer(lambda: shutil.rmtree(folder, ignore_errors=True))
    environment = {
        **os.environ,
        "RAY_TMPDIR": folder,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURMD_NODENAME": "first",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }
    log = tmp_path / "slurm.out"

    def queued() -> subprocess.Popen[bytes]:
        with log.open("ab") as file:
            return subprocess.Popen(
                job, cwd=tmp_path, env=environment, stdout=file, stderr=file, start_new_session=True
            )

    first = queued()
    try:
        end = time.monotonic() + 400
        while not steps_of(tmp_path):
            assert first.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.2)
        # Slurm's `--signal=B:USR1` reaches the script alone.
        first.send_signal(signal.SIGUSR1)
        assert first.wait(200) == 1, log.read_text()[-3000:]
        done = steps_of(tmp_path)
        assert 0 < len(done) < STEPS
        assert (tmp_path / "requeued.txt").read_text() == "requeue 7\n"
    finally:
        _end(first)
    script = (tmp_path / "job.sh").read_text()
    (tmp_path / "job.sh").write_text(once(script, f"max_steps={STEPS}", f"max_steps={done[-1] + 1}"))
    second = queued()
    try:
        assert second.wait(500) == 0, log.read_text()[-3000:]
    finally:
        _end(second)
    assert steps_of(tmp_path) == [*done, done[-1] + 1]
    assert (tmp_path / "requeued.txt").read_text() == "requeue 7\n"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a job: its own processes are those of its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


def test_the_manifests_mount_one_run_folder_and_run_a_command_that_is_accepted(tmp_path: Path) -> None:
    cluster, job = yaml.safe_load_all(shown("manifest"))
    pods: list[Any] = [
        cluster["spec"]["headGroupSpec"]["template"]["spec"],
        *(group["template"]["spec"] for group in cluster["spec"]["workerGroupSpecs"]),
        job["spec"]["template"]["spec"],
    ]
    for pod in pods:
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["runs"]["persistentVolumeClaim"] == {"claimName": "runs"}
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        (container,) = pod["containers"]
        assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/runs", "/dev/shm"}
    assert len({pod["containers"][0]["image"] for pod in pods}) == 1
    join, train = pods[-1]["containers"][0]["args"][0].replace("\\\n", " ").strip().splitlines()
    assert join == f"ray start --address={cluster['metadata']['name']}-head-svc:6379 --num-cpus=0"
    words = shlex.split(train)
    assert (words[:3], words[-1]) == (["exec", "unirl", "train"], "--continue")
    plan = compose(words[3], words[4:-1], catalog=catalog())
    verdict = match(plan, catalog=catalog())
    assert verdict.accepted, verdict.reasons
    (ranks,) = {group["replicas"] * 8 for group in cluster["spec"]["workerGroupSpecs"]}
    assert plan.launcher.config.train_ranks == ranks
