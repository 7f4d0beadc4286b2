"""Config of the vllm engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from unirl.core.limits import limit
from unirl.engine_host.config import OTHER_LAYOUT, SPLIT
from unirl.engine_host.text_config import ExternalTextConfig

__all__ = ["VllmConfig"]


@dataclass
class VllmConfig(ExternalTextConfig):
    """Settings of all external text engines; `extra` holds arguments of `vllm.LLM`."""

    tensor_parallel: int = limit(1, least=1)
    """Tensor-parallel size: devices starting at the engine's, or processes on a CPU."""

    unsupported: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("extra.pipeline_parallel_size", "extra.data_parallel_size", "extra.enable_expert_parallel"), SPLIT
        ),
        **dict.fromkeys(("extra.quantization", "extra.quantization_config"), OTHER_LAYOUT),
    }
