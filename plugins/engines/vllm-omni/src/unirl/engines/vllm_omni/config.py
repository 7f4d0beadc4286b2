"""What a recipe can set of the vllm-omni engine."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.core.hosted import HostedConfig

__all__ = ["VllmOmniConfig"]


@dataclass
class VllmOmniConfig(HostedConfig):
    """What every engine in a process of its own has, and this; `extra` holds arguments of `vllm_omni.AsyncOmni`."""

    max_num_seqs: int = 8
    """Samples at most that are denoised and decoded together. Guidance doubles a forward's rows."""
    batch_wait_ms: float = 50.0
    """Longest time that a batch which is not full waits for further samples."""
    step_batching: bool = False
    """Samples join and leave a batch between steps, and none waits for others to begin or to end."""
    cached_prompts: int = 512
    """Prompts whose embeddings are kept, on the device; 0 keeps none."""
    tensor_parallel: int = 1
    """Ranks that share every layer: devices from the engine's own on, or processes on a CPU."""
