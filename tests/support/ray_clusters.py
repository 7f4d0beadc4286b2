"""Ray for tests: one cluster for all tests of a process, or a separate one for a test.

python ray_clusters.py     # start a cluster, print its address, and end it when stdin is closed
"""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from unirl.launchers.ray.ray_worker import SETTINGS

STORE_BYTES = 128 * 2**20
"""Size of a cluster's object store."""
STARTED_WITH = {
    # Ray gives a process that it is to end 5 s to do it itself, which one that was stopped does not.
    "RAY_kill_worker_timeout_milliseconds": "300",
    # It would start one idle worker per CPU, which no test uses: workers have their own variables.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}


@contextmanager
def joined(**variables: str) -> Iterator[None]:
    """Connected to the cluster of this process, which launchers find running and leave as it is.

    variables: of the environment of workers.
    """
    os.environ.update(SETTINGS)
    with _connected({"address": _address()}, variables, {}):
        yield


@contextmanager
def own(*, num_cpus: int = 8, disk: float = 0.95, **variables: str) -> Iterator[None]:
    """Connected to a new cluster, which ends here.  disk: Ray takes one that is fuller for full."""
    os.environ.update(SETTINGS)
    with _connected(_new(num_cpus), variables, {**STARTED_WITH, "RAY_local_fs_capacity_threshold": str(disk)}):
        yield


def _new(num_cpus: int) -> dict[str, Any]:
    """Arguments of `ray.init` for a new cluster."""
    return {
        "address": "local",
        "num_cpus": num_cpus,
        "include_dashboard": False,
        "object_store_memory": STORE_BYTES,
    }


@contextmanager
def _connected(
    words: Mapping[str, Any], variables: Mapping[str, str], started_with: Mapping[str, str]
) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(started_with)
    environment = {"env_vars": dict(variables)} if variables else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(**words, log_to_driver=False, logging_level="ERROR", runtime_env=environment)
    for name in started_with:
        os.environ.pop(name) if name not in before else os.environ.update({name: before[name]})
    try:
        yield
    finally:
        ray.shutdown()


@functools.cache
def _address() -> str:
    """Address of the cluster that all tests of this process share. It ends with the process."""
    environment = {**os.environ, **STARTED_WITH}
    head = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    )
    atexit.register(head.communicate, timeout=30)
    assert head.stdout is not None
    for line in head.stdout:
        if line.startswith("address "):
            return line.split()[1]
    raise AssertionError(f"the cluster of the tests ended with {head.wait()}")


if __name__ == "__main__":
    context = ray.init(**_new(8), log_to_driver=False, logging_level="ERROR")
    print("address", context.address_info["gcs_address"], flush=True)
    sys.stdin.read()
    ray.shutdown()
