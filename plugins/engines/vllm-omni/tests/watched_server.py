"""vLLM-Omni's server, taking two rollouts at once and saying which steps were taken together. Runs in its
environment."""

# vLLM-Omni is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

__all__ = ["calls"]


def calls() -> Mapping[str, Any]:
    """Those of the real server, and `together`: takes two requests as `first` and `second`, gives their tracks as
    those, and the steps of the rows of each batch."""
    from unirl.core.types.request import Request
    from unirl.core.types.serial import from_bytes
    from unirl.engine_host.latent_rows import joined
    from unirl.engines.vllm_omni import pipeline, server

    answered = server.calls()
    real = answered["generate"].__self__

    def together(asked: Mapping[str, Any], tensors: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        batches: list[list[int]] = []
        denoise_step = pipeline.RolloutPipeline.denoise_step

        def watched(self: Any, input_batch: Any, *, states: Any, **further: Any) -> Any:
            batches.append([state.step_index for state in states])
            return denoise_step(self, input_batch, states=states, **further)

        requests: dict[str, Any] = {name: from_bytes(data.numpy().tobytes(), Request) for name, data in tensors.items()}

        async def rows() -> list[Any]:
            return await asyncio.gather(*(real._rows(request) for request in requests.values()))

        with patch.object(pipeline.RolloutPipeline, "denoise_step", watched):
            result = real._run(rows())
        answers = {name: joined(requests[name], each) for name, each in zip(requests, result, strict=True)}
        return batches, {name: answer[1]["track"] for name, answer in answers.items()}

    return {**answered, "together": together}
