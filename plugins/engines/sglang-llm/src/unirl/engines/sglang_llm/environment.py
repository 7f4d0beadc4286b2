"""SGLang's environment, and the tested versions of SGLang."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet
from unirl.engine_host.environment import EngineEnvironment
from unirl.engine_host.program import Product

__all__ = ["ENVIRONMENT", "PRODUCT"]

ENVIRONMENT = EngineEnvironment(
    name="sglang-llm",
    package="unirl.engines.sglang_llm",
    locks={"cpu": "locks/cpu.txt", "cuda": "locks/cuda.txt"},
    additions={"cpu": ("unirl.engine_cpu:torchvision-schemas", "unirl.engine_cpu:sglang-platform")},
    python="3.11",
    serve="unirl.engines.sglang_llm.server:calls",
    modules=tuple(f"unirl.engines.sglang_llm.{name}" for name in ("server", "scheduler", "held", "images")),
    notes={
        "cpu": "SGLang runs here on torch 2.13 and its CPU platform, which the SGLang project does not test; it is "
        "meant for tests.",
    },
)

PRODUCT = Product(
    title="SGLang",
    environment=ENVIRONMENT,
    # The engine patches SGLang's scheduler and sampler, which change between versions.
    tested=SpecifierSet(">=0.5.23,<0.5.24"),
    says_cut_log_probs=True,
)
