"""No output of a batch is lost between vLLM-Omni's threads. Imported in its environment alone."""

# vLLM-Omni is in the engine's environment alone, where type checking does not look.
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

__all__ = ["keep"]


def keep() -> None:
    """Make vLLM-Omni's executor deliver the output of a batch that comes in while the batch is being registered.

    Its result pump looks for the requests of the batch, unpacks the output, and then caches it for whoever asks for the
    batch. If the engine registers those requests meanwhile, nothing ever asks, and they wait forever. Both steps hold
    the executor's lock, so looking once more where the output is cached is enough.
    """
    from vllm_omni.diffusion.executor.multiproc_executor import MultiprocDiffusionExecutor

    finish = MultiprocDiffusionExecutor._finish_output

    def finish_output(self: Any, output_id: str, result: Any, error: BaseException | None) -> None:
        requests = self._batch_split_map.pop(output_id, None)
        if requests is None:
            finish(self, output_id, result, error)
        else:
            self._deliver_batch_split(requests, result, None if error is None else str(error))

    MultiprocDiffusionExecutor._finish_output = finish_output
