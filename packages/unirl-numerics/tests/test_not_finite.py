"""The first layer whose output is not finite is named, with what makes it so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from unirl.numerics.not_finite import first_not_finite

LARGEST = torch.finfo(torch.float32).max


class Tied(nn.Module):
    """A trunk, and a projection that is computed from the weight of a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
        self.head = nn.Linear(2, 3)
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return self.trunk(x) @ self.head.weight.T


CASES = {
    "NaN in a weight": ("trunk.1.0.weight", torch.nan, 1.0, ", first at layer 'trunk.1.0' (Linear): the weight "),
    "a bias": ("trunk.0.bias", torch.inf, 1.0, ", first at layer 'trunk.0' (Linear): the weight 'trunk.0.bias'"),
    "the projection": ("head.weight", torch.nan, 1.0, ", first at layer 'head' (Linear): the weight 'head.weight'"),
    "an overflow": ("trunk.0.weight", LARGEST, 1.0, ", first at layer 'trunk.0' (Linear): its weights are finite, and"),
    "its input": ("head.bias", 0.0, torch.nan, ", first at layer 'trunk.0' (Linear): it is given NaN. Check the"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_first_layer_and_the_reason_are_named(name: str) -> None:
    weight, value, given, says = CASES[name]
    model = Tied()
    model.get_parameter(weight).data.fill_(value)
    calls: list[int] = []

    def run() -> None:
        calls.append(1)
        model(torch.full((1, 2), given))

    assert first_not_finite(model, run).startswith(says)
    assert calls == [1]
    # No hook is left.
    model(torch.ones(1, 2))
