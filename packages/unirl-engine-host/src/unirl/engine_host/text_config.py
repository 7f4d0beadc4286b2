"""Config shared by all external text engines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from unirl.core.acceleration import FP32, Acceleration
from unirl.core.limits import Reason, limit

from .config import ExternalConfig

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["ExternalTextConfig"]


@dataclass
class ExternalTextConfig(ExternalConfig):
    """Settings common to all external text engines."""

    max_model_len: int = limit(0, least=0)
    """Maximum length of prompt plus completion, in tokens; 0 uses the checkpoint's limit."""
    max_num_seqs: int = limit(256, least=1)
    """Maximum number of completions generated concurrently."""
    gpu_memory: float = limit(0.9, above=0, most=1)
    """Fraction of GPU memory for the engine, weights and KV cache together."""
    kv_cache_mb: int = limit(0, least=0)
    """Size of the KV cache in MiB, overriding the remainder of `gpu_memory`; 0 means 1024 on a CPU."""
    prefix_caching: bool = True
    """Prefix caching: compute shared prompt prefixes once. Every weight sync empties the cache."""
    lora_rank: int = limit(0, least=0)
    """Largest LoRA rank accepted; 0 accepts only full weights."""
    batch_invariant: bool = False
    """The engine's batch-invariant mode, in which a completion does not depend on its batch; GPUs only. Set by
    `run.batch_invariant`."""
    seed: int = limit(0, least=0, most=2**32 - 1)
    """The engine's global seed. Completions do not depend on it: each sample has its own seed."""

    has_batch_invariant_mode: ClassVar[bool] = True
    rounding_only = ("max_num_seqs", "gpu_memory", "kv_cache_mb")
    accelerations: ClassVar[Mapping[str, Acceleration]] = {
        "prefix_caching": Acceleration(scope="rollout", error=FP32, tries=(True,)),
        # Keys and values in 4 or 8 bits, by scales that nothing fits to the weights that train.
        "extra.kv_cache_dtype": Acceleration(scope="rollout", error=math.inf),
    }

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Also batch invariance on the CPU, and LoRA training with a `lora_rank` of 0."""
        yield from super().problems(plan, stage)
        if plan is not None and stage is not None and plan.run.batch_invariant and plan.run.device == "cpu":
            yield Reason(
                key="run.batch_invariant",
                text=f"got true with run.device=cpu; engine {stage.engine.name!r} has its batch-invariant mode only on "
                "GPUs. Use an in-process engine, such as trainside, or unset it.",
            )
        backend = None if stage is None else stage.backend
        if backend is not None and backend.config.trains == "lora" and not self.lora_rank:
            yield Reason(
                key=".lora_rank",
                text="got 0, but the backend trains LoRA adapters; set their rank, such as "
                "engine.lora_rank='${backend.lora.rank}'.",
            )
