"""The two denoisers of Wan 2.2 as one module.

Source: diffusers' `WanPipeline`: timesteps from the boundary on go to `transformer`, those below it to `transformer_2`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

__all__ = ["Experts"]


class Experts(nn.Module):
    """Calls, for each row, the expert of its noise."""

    def __init__(self, transformer: nn.Module, transformer_2: nn.Module, *, boundary: float) -> None:
        """transformer: for timesteps >= 1000 boundary.  transformer_2: for those below."""
        super().__init__()
        self.transformer = transformer
        self.transformer_2 = transformer_2
        self.boundary = boundary
        # diffusers notes there which folder the weights came from, as engines ask.
        self.config = transformer.config

    def forward(
        self, *, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, **options: Any
    ) -> tuple[Tensor]:
        """Velocities [B, C, F, H, W].  hidden_states: [B, C, F, H, W].  timestep: [B], fp32, 1000 sigma.
        encoder_hidden_states: [B, L, D].

        Ranks that share sharded experts call the same ones: an expert that another rank needs is called on one row,
        whose result counts nothing.
        """
        is_high = timestep >= 1000.0 * self.boundary
        is_called = self._anywhere(torch.stack([is_high.any(), (~is_high).any()]))
        if torch.is_grad_enabled():
            # Rows of a frozen expert alone would have no gradient at all.
            trains = [
                any(p.requires_grad for p in expert.parameters()) for expert in (self.transformer, self.transformer_2)
            ]
            is_called = [
                called or (trained and not all(trains)) for called, trained in zip(is_called, trains, strict=True)
            ]
        parts: list[Tensor] = []
        order: list[Tensor] = []
        idle: list[Tensor] = []
        for expert, own, called in zip(
            (self.transformer, self.transformer_2), (is_high, ~is_high), is_called, strict=True
        ):
            if not called:
                continue
            rows = own.nonzero().flatten()
            taken = rows if len(rows) else torch.zeros(1, dtype=torch.int64, device=rows.device)
            output: Tensor = expert(
                hidden_states=hidden_states[taken],
                timestep=timestep[taken],
                encoder_hidden_states=encoder_hidden_states[taken],
                **options,
            )[0]
            if len(rows):
                parts.append(output)
                order.append(rows)
            else:
                # Its gradient is zero, and its backward pass runs on all ranks alike.
                idle.append(0.0 * output.sum())
        result = torch.cat(parts)[torch.cat(order).argsort()]
        return (sum(idle, result),)

    def _anywhere(self, needed: Tensor) -> list[bool]:
        """Which experts some rank needs; without sharding, which this one does."""
        if isinstance(self, FSDPModule) and torch.distributed.is_initialized():
            needed = needed.to(torch.int32)
            torch.distributed.all_reduce(needed, op=torch.distributed.ReduceOp.MAX)
        return cast("list[bool]", needed.bool().tolist())
