"""Forwards, backwards and samples are those of the steps, and nothing else."""

from __future__ import annotations

import torch
from torch import nn
from unirl.league.meter import Meter


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(8, 3), nn.Linear(3, 2)

    def forward(self, *, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": self.linear(hidden if hidden.is_floating_point() else self.embed(hidden))}


def test_rows_are_counted_in_steps_alone_and_backwards_when_the_gradient_comes() -> None:
    net = Net()
    meter = Meter(net)
    net(hidden=torch.ones(9, 3))
    meter.begin()
    with torch.no_grad():
        net(hidden=torch.ones(5, 3))
    net(hidden=torch.ones(4, 3))
    # Two passes, one of them without a backward.
    net(hidden=torch.ones(2, 3))["out"].sum().backward()
    spent = meter.end(samples=7)
    assert (spent.steps, spent.samples, spent.forwards, spent.backwards) == (1, 7, 11, 2)
    net(hidden=torch.ones(9, 3))["out"].sum().backward()
    meter.begin()
    spent = meter.end(samples=1)
    assert (spent.steps, spent.samples, spent.forwards, spent.backwards) == (2, 8, 11, 2)
    assert spent.cpu_s > 0 and spent.wall_s > 0


def test_tokens_are_counted_where_the_input_is_token_ids() -> None:
    net = Net()
    meter = Meter(net)
    meter.begin()
    net(hidden=torch.zeros(2, 6, dtype=torch.long))["out"].sum().backward()
    spent = meter.end(samples=2)
    assert (spent.forwards, spent.backwards) == (12, 12)
