"""The worker: vLLM-Omni's, with a sleep that needs no allocator of CUDA, and its output thread without a stream."""

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
"""Versions of vLLM-Omni whose output thread is known."""


class CpuDiffusionWorker(DiffusionWorker):
    """Asleep, its weights lie in a temporary file and their memory is given back."""

    _asleep: Any = None

    def sleep(self, level: int = 1) -> int:
        """Bytes given back. Level 1 alone: level 2 would throw the weights away, which nothing brings back."""
        if level != 1:
            raise ValueError(f"sleep of level {level} was asked for; on a CPU there is level 1 alone.")
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
    """What `WorkerProc` runs in a thread, without its stream of an accelerator: there is none."""
    while (item := self._async_output_queue.get()) is not None:
        output, number, _ = item
        try:
            pack_diffusion_output_shm(output)
            found: dict[str, Any] = {"output": output}
        except Exception as error:  # noqa: BLE001 - the engine raises it
            found = {"error": f"{type(error).__name__}: {error}"}
        self._enqueue_result(AsyncDiffusionOutput(kind=AsyncOutputKind.OUTPUT_READY, async_output_id=number, **found))
        with self._async_output_done:
            self._async_output_pending = max(0, self._async_output_pending - 1)
            self._async_output_done.notify_all()


def _replace_output_thread() -> None:
    """The stock one asks for the type of the current accelerator before it takes anything, and the engine then waits
    for ever. Used by workers in processes of their own alone. Raises RuntimeError for a version where it may differ."""
    found = version("vllm-omni")
    if not SEEN.contains(found, prereleases=True) or "_async_output_loop" not in vars(WorkerProc):
        raise RuntimeError(f"vLLM-Omni {found} is installed; this platform knows the output thread of {SEEN}.")
    if torch.accelerator.current_accelerator() is None:
        WorkerProc._async_output_loop = _send_outputs


_replace_output_thread()
