"""The environment that SGLang runs in, and the versions of SGLang that this engine was tried with."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet
from unirl.runtime.engine_host.environment import EngineEnvironment
from unirl.runtime.engine_host.program import Product

__all__ = ["ENVIRONMENT", "PRODUCT"]

ROLLOUTS = "unirl.engines.sglang:rollouts-plugin"

ENVIRONMENT = EngineEnvironment(
    name="sglang",
    package="unirl.engines.sglang",
    locks={"cpu": "locks/cpu.txt", "cuda": "locks/cuda.txt"},
    python="3.11",
    serve="unirl.engines.sglang.server:calls",
    modules=(
        *(f"unirl.core.{name}" for name in ("array", "batch", "config", "data", "errors", "names")),
        *(f"unirl.core.{name}" for name in ("request", "rollout", "serial", "track", "weights")),
        *(f"unirl.numerics.{name}" for name in ("denoise", "guidance", "kernels", "latent_rollout", "noise")),
        "unirl.numerics.latent_rows",
        "unirl.runtime.engine_host.received",
        *(f"unirl.engines.sglang.{name}" for name in ("bridge", "control", "pipeline", "server", "stages", "weights")),
    ),
    additions={
        "cpu": ("unirl.engine_cpu:torchvision-schemas", "unirl.engine_cpu:sglang-platform", ROLLOUTS),
        "cuda": (ROLLOUTS,),
    },
    notes={
        "cpu": "SGLang runs here on torch 2.13 and its own platform for CPUs, which its project does not test; it is "
        "meant for tests.",
    },
)

PRODUCT = Product(
    title="SGLang",
    environment=ENVIRONMENT,
    # It subclasses stages of SGLang's pipelines, which change from one version to the next.
    tested=SpecifierSet(">=0.5.23,<0.5.24"),
)
