"""Config of the vllm engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from unirl.engine_host.config import OTHER_LAYOUT, SPLIT
from unirl.engine_host.text_config import ExternalTextConfig

__all__ = ["VllmConfig"]


@dataclass
class VllmConfig(ExternalTextConfig):
    """Settings of all external text engines; `extra` holds arguments of `vllm.LLM`."""

    unsupported: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("extra.tensor_parallel_size", "extra.pipeline_parallel_size", "extra.data_parallel_size"), SPLIT
        ),
        **dict.fromkeys(("extra.quantization", "extra.quantization_config"), OTHER_LAYOUT),
    }
