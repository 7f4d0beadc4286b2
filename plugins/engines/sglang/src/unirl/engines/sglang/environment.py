"""SGLang's environment, and the tested versions of SGLang."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet
from unirl.engine_host.environment import EngineEnvironment
from unirl.engine_host.program import Product

__all__ = ["ENVIRONMENT", "PRODUCT"]

ROLLOUTS = "unirl.engines.sglang:rollouts-plugin"

ENVIRONMENT = EngineEnvironment(
    name="sglang",
    package="unirl.engines.sglang",
    locks={"cpu": "locks/cpu.txt", "cuda": "locks/cuda.txt"},
    python="3.11",
    serve="unirl.engines.sglang.server:calls",
    modules=("unirl.engines.sglang.server", "unirl.engines.sglang.pipeline"),
    additions={
        "cpu": ("unirl.engine_cpu:torchvision-schemas", "unirl.engine_cpu:sglang-platform", ROLLOUTS),
        "cuda": (ROLLOUTS,),
    },
    notes={
        "cpu": "SGLang runs here on torch 2.13 and its CPU platform, which the SGLang project does not test; it is "
        "meant for tests.",
    },
)

PRODUCT = Product(
    title="SGLang",
    environment=ENVIRONMENT,
    # The engine subclasses stages of SGLang's pipelines, which change between versions.
    tested=SpecifierSet(">=0.5.23,<0.5.24"),
)
