"""Config of the sglang-llm engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from unirl.core.acceleration import FP32, Acceleration
from unirl.engine_host.config import OTHER_LAYOUT, SPLIT
from unirl.engine_host.text_config import ExternalTextConfig

__all__ = ["SglangConfig"]


@dataclass
class SglangConfig(ExternalTextConfig):
    attention: str = ""
    """SGLang's attention backend, such as `fa3`, `flashinfer` or `triton`; empty leaves the choice to SGLang, or
    `torch_native` on a CPU."""

    accelerations: ClassVar[Mapping[str, Acceleration]] = {"attention": Acceleration(scope="rollout", error=FP32)}
    unsupported: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("extra.tp_size", "extra.pp_size", "extra.dp_size", "extra.ep_size", "extra.nnodes"), SPLIT),
        **dict.fromkeys(("extra.quantization", "extra.torchao_config"), OTHER_LAYOUT),
        "extra.speculative_algorithm": "tokens would not come from the seed of their sample",
    }
