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


def test_what_overflows_in_fp16_alone_is_told_the_other_dtypes() -> None:
    model, x = Tied(), torch.full((1, 2), 100.0)
    # 1000 x 100 x 2 is more than 65504, the largest number of fp16, and far from that of fp32 and bf16.
    model.trunk[0].weight.data.fill_(1000.0)
    for dtype in (torch.float32, torch.bfloat16):
        assert model.to(dtype)(x.to(dtype)).isfinite().all()
    model.half()
    says = first_not_finite(model, lambda: model(x.half()))
    assert says.startswith(", first at layer 'trunk.0' (Linear): its weights are finite, and its output overflows. ")
    assert "Use bfloat16 or float32, not float16" in says
