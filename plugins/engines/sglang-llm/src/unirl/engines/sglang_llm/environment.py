"""The environment that SGLang runs in, and the versions of SGLang that this engine was tried with."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet
from unirl.runtime.engine_host.environment import EngineEnvironment
from unirl.runtime.engine_host.program import Product

__all__ = ["ENVIRONMENT", "PRODUCT"]

ENVIRONMENT = EngineEnvironment(
    name="sglang-llm",
    package="unirl.engines.sglang_llm",
    locks={"cpu": "locks/cpu.txt", "cuda": "locks/cuda.txt"},
    additions={"cpu": ("unirl.engine_cpu:torchvision-schemas", "unirl.engine_cpu:sglang-platform")},
    python="3.11",
    serve="unirl.engines.sglang_llm.server:calls",
    modules=(
        "unirl.core.array",
        "unirl.core.names",
        "unirl.core.weights",
        "unirl.numerics.token_draws",
        "unirl.runtime.engine_host.received",
        "unirl.engines.sglang_llm.server",
        "unirl.engines.sglang_llm.scheduler",
        "unirl.engines.sglang_llm.held",
    ),
    notes={
        "cpu": "SGLang runs here on torch 2.13 and its own platform for CPUs, which its project does not test; it is "
        "meant for tests.",
    },
)

PRODUCT = Product(
    title="SGLang",
    environment=ENVIRONMENT,
    # It reaches into SGLang's scheduler and sampler, which change from one version to the next.
    tested=SpecifierSet(">=0.5.23,<0.5.24"),
    says_cut_log_probs=True,
)
