"""Settings shared by all language models that are loaded from a checkpoint in the transformers layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from unirl.core.acceleration import FP32, NARROW, Acceleration
from unirl.core.limits import Reason, limit, one_of
from unirl.core.specs.part_config import PartConfig

from ..attention import OF_TRANSFORMERS, Attention, attention_problems
from ..checkpoint_problems import checkpoint_problems, lora_problems
from ..model_files import DTYPES, checkpoint_version

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["CausalLmConfig"]


@dataclass
class CausalLmConfig(PartConfig):
    """A model plugin subclasses it to add its own settings."""

    path: str = "???"
    """Folder in the transformers layout, or a hub id such as the one in the README of the model's package."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; None is its main branch."""
    dtype: str = one_of(*DTYPES, default="float32")
    """Dtype of the weights: `float32`, `bfloat16` or `float16`. Log-probs and sampled logits are always fp32."""
    autocast: str | None = one_of(*DTYPES, default=None)
    """Run the decoder under autocast to this dtype, keeping float32 master weights; None turns autocast off."""
    attention: str = "auto"
    """Attention, by transformers' name: `sdpa`, `eager`, `flash_attention_2` to `4`, `flex_attention`, or a kernel of
    the hub such as `kernels-community/flash-attn3`. `auto` uses flash attention 2 if it is installed and the model runs
    on a GPU in 16 bit, else sdpa. For rollouts in process and training alike; flex compiles for each length."""
    logits_chunk: int = limit(0, least=0)
    """Tokens per chunk of logits when computing log-probs; 0 takes as many as fit in 256 MiB. Affects memory, not
    results."""

    accelerations: ClassVar[Mapping[str, Acceleration]] = {
        "dtype": Acceleration(scope="both", error=NARROW),
        "autocast": Acceleration(scope="both", error=NARROW),
        "attention": Acceleration(scope="both", error=FP32, exact=("sdpa",), tries=("eager",)),
    }

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """What the files of a local checkpoint rule out."""
        yield from super().problems(plan, stage)
        known = {"auto": Attention(), **OF_TRANSFORMERS}
        yield from attention_problems(self, self.attention, known, plan=plan, stage=stage)
        yield from checkpoint_problems(self.path)
        yield from lora_problems(self, plan, stage, projection="lm_head")

    def read_versions(self) -> Mapping[str, str]:
        """Version of the checkpoint, if it is in a local folder."""
        version = checkpoint_version(self.path)
        return {".path": version} if version else {}
