"""vLLM-Omni's server, registering each batch while its output is being unpacked. Runs in its environment."""

# vLLM-Omni is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

__all__ = ["calls"]

UNPACK_S, REGISTER_S = 1.0, 0.5
"""The output takes longer than the registration, and both come in within milliseconds."""


def calls() -> Mapping[str, Any]:
    """Those of the real server."""
    from unirl.engines.vllm_omni import server
    from vllm_omni.diffusion.executor import multiproc_executor as executor

    unpack = executor.unpack_diffusion_output_shm
    rpc = executor.MultiprocDiffusionExecutor.collective_rpc

    def slow_unpack(output: Any) -> Any:
        time.sleep(UNPACK_S)
        return unpack(output)

    def slow_rpc(self: Any, method: Any, *arguments: Any, **options: Any) -> Any:
        result = rpc(self, method, *arguments, **options)
        if method == "execute_model_batch":
            time.sleep(REGISTER_S)
        return result

    executor.unpack_diffusion_output_shm = slow_unpack
    executor.MultiprocDiffusionExecutor.collective_rpc = slow_rpc
    return server.calls()
