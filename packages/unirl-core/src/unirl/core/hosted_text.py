"""What engines for text that run as programs of their own have in common for a recipe: settings, and their bounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from .config import BackendConfig
from .hosted import HostedConfig, too_small

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["HostedTextConfig", "setting_reasons", "with_run_folder"]


@dataclass
class HostedTextConfig(HostedConfig):
    """Settings of every such engine."""

    max_model_len: int = 0
    """Longest prompt with its text, in tokens; 0 is what the checkpoint allows."""
    max_num_seqs: int = 256
    """Texts at most that are generated at the same time."""
    gpu_memory: float = 0.9
    """Share of the GPU's memory that the engine takes, weights and cache together."""
    kv_cache_mb: int = 0
    """Memory of the key-value cache in MiB, in place of what `gpu_memory` leaves; 0 on a CPU takes 1024."""
    prefix_caching: bool = True
    """Compute the beginning that prompts share once. The cache is emptied with every sync of weights."""
    lora_rank: int = 0
    """Largest rank of the adapters that are sent; 0 takes full weights alone."""
    seed: int = 0
    """The engine's own seed. Texts do not depend on it: each sample has a seed of its own."""


def setting_reasons(plan: Plan) -> Iterator[str]:
    """Why the settings of a plan whose engine has this config cannot be."""
    config, backend = cast("HostedTextConfig", plan.engine.config), cast("BackendConfig", plan.backend.config)
    yield from too_small(config, max_model_len=0, max_num_seqs=1, kv_cache_mb=0, lora_rank=0)
    if not 0 < config.gpu_memory <= 1:
        yield f"engine.gpu_memory: {config.gpu_memory} was asked for; it is a share, above 0 and at most 1."
    if backend.trains == "lora" and not config.lora_rank:
        yield (
            "engine.lora_rank: 0 was asked for, and the backend trains adapters; give their rank, such as "
            "engine.lora_rank='${backend.lora.rank}'."
        )


def with_run_folder(plan: Plan, folder: Path) -> Plan:
    """The plan with a run's folder in place of `{run}` in the settings of its engine."""
    config = plan.engine.config
    texts = {item.name: getattr(config, item.name) for item in fields(config)}
    named = {
        name: text.replace("{run}", str(folder.resolve()))
        for name, text in texts.items()
        if isinstance(text, str) and "{run}" in text
    }
    return replace(plan, engine=replace(plan.engine, config=replace(config, **named))) if named else plan
