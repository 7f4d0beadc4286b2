"""What a recipe can set of the vllm engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from unirl.core.config import PartConfig

__all__ = ["VllmConfig"]


@dataclass
class VllmConfig(PartConfig):
    path: str = ""
    """Folder of the checkpoint; empty is the one that the model which trains was loaded from."""
    dtype: str = "auto"
    """Dtype that vLLM holds the weights in and computes in; `auto` is that of the module that trains. Where it is named
    and narrower than the weights that are sent, they are rounded to it."""
    max_model_len: int = 0
    """Longest prompt with its text, in tokens; 0 is what the checkpoint allows."""
    max_num_seqs: int = 256
    """Texts at most that are generated at the same time."""
    gpu_memory: float = 0.9
    """Share of the GPU's memory that vLLM takes, weights and cache together."""
    kv_cache_mb: int = 0
    """Memory of the key-value cache in MiB, in place of what `gpu_memory` leaves; 0 on a CPU takes 1024."""
    enforce_eager: bool = False
    """Run without CUDA graphs and compilation: starts faster, generates slower. Always so on a CPU."""
    prefix_caching: bool = True
    """Compute the beginning that prompts share once. The cache is emptied with every sync of weights."""
    lora_rank: int = 0
    """Largest rank of the adapters that are sent; 0 takes full weights alone."""
    sleep_mode: bool = False
    """CUDA: give the memory back while training runs on the same GPU."""
    seed: int = 0
    """vLLM's own seed. Texts do not depend on it: each sample has a seed of its own."""
    log_level: str = "WARNING"
    """Of vLLM's log: `DEBUG`, `INFO`, `WARNING` or `ERROR`."""
    log_file: str = ""
    """File that vLLM's output is appended to; empty keeps it while the engine is there, for the errors that show it."""
    env_dir: str = ""
    """Folder of environments, that of `unirl engine-env --dir`; empty is the usual one."""
    transfer_dir: str = ""
    """Folder that weights pass through; empty is the machine's shared memory, or its temporary folder where they do not
    fit."""
    start_timeout_s: float = 900.0
    """Longest time for vLLM to be imported and to load the checkpoint."""
    generate_timeout_s: float = 3600.0
    """Longest time for one rollout."""
    sync_timeout_s: float = 600.0
    """Longest time for taking weights."""
    extra: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Further arguments of `vllm.LLM`, by its names; those that other keys stand for cannot be given."""
