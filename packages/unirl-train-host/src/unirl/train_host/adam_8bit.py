"""AdamW with moments in 8 bits, through torchao."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .config import ShardedConfig
from .optimizer import Optimizer
from .sharding import check_compiler

__all__ = ["adam_8bit"]


def adam_8bit(params: Mapping[str, Tensor], config: ShardedConfig, *, total_steps: int) -> Optimizer:
    """AdamW whose moments have a code of 8 bits for each element and an fp32 scale for each 256 (dynamic quantization,
    arXiv 2110.02861). They stay in fp32 where a rank holds fewer than 4096 elements of a weight, or no multiple of 256.

    torchao compiles the step, once for each shape: raises RecipeError, key `backend.optimizer`, where torch cannot.
    """
    check_compiler(next(iter(params.values())).device, key="backend.optimizer", value="adamw_8bit", instead="adamw")
    torchao: Any = importlib.import_module("torchao.optim")
    adam: Any = torchao.AdamW8bit(
        list(params.values()),
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        weight_decay=config.weight_decay,
    )

    def zeros(param: Tensor) -> dict[str, Tensor]:
        return {
            "step": torch.zeros(()),
            "exp_avg": adam._new_buffer(param, signed=True),
            "exp_avg_sq": adam._new_buffer(param, signed=False),
        }

    return Optimizer(params, config, total_steps=total_steps, adams=[adam], zeros=zeros)
