"""What a recipe can set of the vllm-omni engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from unirl.core.config import PartConfig

__all__ = ["VllmOmniConfig"]


@dataclass
class VllmOmniConfig(PartConfig):
    path: str = ""
    """Folder of the checkpoint in the diffusers layout; empty is the one that the model which trains was loaded
    from."""
    dtype: str = "auto"
    """Dtype that vLLM-Omni holds all components in and computes in; `auto` is that of the module that trains. Where it
    is named and narrower than the weights that are sent, they are rounded to it."""
    max_num_seqs: int = 8
    """Samples at most that are denoised and decoded together. Guidance doubles a forward's rows."""
    batch_wait_ms: float = 50.0
    """Longest time that a batch which is not full waits for further samples."""
    cached_prompts: int = 512
    """Prompts whose embeddings are kept, on the device; 0 keeps none."""
    tensor_parallel: int = 1
    """Ranks that share every layer: devices from the engine's own on, or processes on a CPU."""
    enforce_eager: bool = False
    """Run without compilation: starts faster, generates slower. Always so on a CPU."""
    sleep_mode: bool = False
    """Give the memory of the weights back while training runs on the same device."""
    log_level: str = "WARNING"
    """Of vLLM-Omni's log: `DEBUG`, `INFO`, `WARNING` or `ERROR`."""
    log_file: str = "{run}/logs/{part}-{pid}.log"
    """File that the engine's output is appended to. `{run}` is the run's folder, `{part}` the engine's name, `{pid}`
    the process that it works for. Empty, or with `{run}` and no run, it is kept while the engine is there, for the
    errors that show it."""
    env_dir: str = ""
    """Folder of environments, that of `unirl engine-env --dir`; empty is the usual one."""
    transfer_dir: str = ""
    """Folder that weights pass through; empty is the machine's shared memory, or its temporary folder where they do not
    fit."""
    start_timeout_s: float = 900.0
    """Longest time for vLLM-Omni to be imported and to load the checkpoint."""
    generate_timeout_s: float = 3600.0
    """Longest time for one rollout."""
    sync_timeout_s: float = 600.0
    """Longest time for taking weights."""
    extra: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Further arguments of `vllm_omni.AsyncOmni`, by its names; those that other keys stand for cannot be given."""
