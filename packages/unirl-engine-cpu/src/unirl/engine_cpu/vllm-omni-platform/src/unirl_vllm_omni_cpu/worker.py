"""vLLM-Omni's worker, with a sleep without the CUDA allocator and an output thread without a CUDA stream."""

# vLLM is in the environments of engines alone, where type checking does not look.
# pyright: reportMissingImports=false

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from vllm_omni.diffusion.data import AsyncDiffusionOutput, AsyncOutputKind
from vllm_omni.diffusion.ipc import pack_diffusion_output_shm
from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker, WorkerProc

__all__ = ["CpuDiffusionWorker"]

SEEN = SpecifierSet(">=0.30,<0.33")
"""Versions of vLLM-Omni whose output thread may be replaced."""


class CpuDiffusionWorker(DiffusionWorker):
    """Sleep moves the weights to a temporary file and releases their memory."""

    _asleep: Any = None

    def sleep(self, level: int = 1) -> int:
        """Returns the number of bytes released. Only level 1: level 2 would discard the weights."""
        if level != 1:
            raise ValueError(f"sleep: got level {level}, expected 1, the only one on a CPU.")
        if self._asleep is None:
            weights = list(self._weights())
            self._asleep = tempfile.TemporaryFile(prefix="vllm-omni-asleep-")  # noqa: SIM115 - open until it wakes
            torch.save([weight.data for weight in weights], self._asleep)
            for weight in weights:
                weight.data = weight.data.new_empty(0)
        return self._asleep.tell()

    def wake_up(self, tags: list[str] | None = None) -> bool:
        if self._asleep is not None:
            self._asleep.seek(0)
            for weight, data in zip(self._weights(), torch.load(self._asleep), strict=True):
                weight.data = data
            self._asleep.close()
            self._asleep = None
        return True

    def _weights(self) -> Iterator[torch.nn.Parameter]:
        assert self.model_runner is not None and self.model_runner.pipeline is not None
        return self.model_runner.pipeline.parameters()

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        return nullcontext()


def _send_outputs(self: Any) -> None:
    """The output thread of `WorkerProc`, without an accelerator stream."""
    while (item := self._async_output_queue.get()) is not None:
        output, number, _ = item
        try:
            pack_diffusion_output_shm(output)
            result: dict[str, Any] = {"output": output}
        except Exception as error:  # noqa: BLE001 - the engine re-raises it
            result = {"error": f"{type(error).__name__}: {error}"}
        self._enqueue_result(AsyncDiffusionOutput(kind=AsyncOutputKind.OUTPUT_READY, async_output_id=number, **result))
        with self._async_output_done:
            self._async_output_pending = max(0, self._async_output_pending - 1)
            self._async_output_done.notify_all()


def _replace_output_thread() -> None:
    """Replace the output thread, which needs an accelerator before it takes any output, so that the engine would hang.
    Only used by workers in separate processes. Raises RuntimeError for an untested version."""
    result = version("vllm-omni")
    if not SEEN.contains(result, prereleases=True) or "_async_output_loop" not in vars(WorkerProc):
        raise RuntimeError(
            f"got vLLM-Omni {result}, expected {SEEN}, whose output thread this CPU platform can replace."
        )
    if torch.accelerator.current_accelerator() is None:
        WorkerProc._async_output_loop = _send_outputs


_replace_output_thread()
