"""Config of the trainside engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from unirl.core.acceleration import Acceleration
from unirl.core.limits import Reason, limit
from unirl.core.specs.part_config import PartConfig

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["NO_GPU", "TrainsideConfig"]

NO_GPU = "encoders and VAE are in CPU memory already, and moving them frees nothing. Leave it out, or use a GPU."


@dataclass
class TrainsideConfig(PartConfig):
    forward_batch: int = limit(0, least=0)
    """Batch size for denoising and decoding, or for generating completions; 0 takes the whole request. Guidance doubles
    a forward's rows."""
    cached_prompts: int = limit(512, least=0)
    """Number of prompts whose embeddings are cached in host memory between steps (LRU); 0 disables the cache. SD3.5
    with 256 T5 tokens takes 2.7 MB per prompt in bfloat16."""
    offload_idle: bool = False
    """Keep text encoders and VAE in CPU memory while the model denoises and trains: they are on the GPU while
    prompts that are not cached are encoded and while samples are decoded. Refused on a CPU, where it gains nothing."""

    rounding_only = ("forward_batch", "offload_idle")
    accelerations: ClassVar[Mapping[str, Acceleration]] = {
        "cached_prompts": Acceleration(scope="rollout", error=0.0, tries=(1, 512))
    }

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Nothing to offload, or nothing that is idle."""
        if not self.offload_idle or plan is None or stage is None:
            return
        if plan.run.device == "cpu":
            yield Reason(key=".offload_idle", text=f"got true with run.device=cpu; {NO_GPU}")
        if stage.kind != "latent":
            text = (
                f"got true, but {stage.model.name!r} generates text and has neither encoders nor a VAE. Leave it out."
            )
            yield Reason(key=".offload_idle", text=text)
        if stage.needs.reward == "differentiable":
            text = (
                "got true, but the loss decodes samples, so the VAE is not idle while the model trains. Leave it out."
            )
            yield Reason(key=".offload_idle", text=text)
