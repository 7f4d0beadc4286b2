"""Forwards of rows that do not fit into one batch."""

from __future__ import annotations

import torch
from unirl.model_host.diffusion.equal_forwards import in_groups


def test_rows_of_equal_keys_go_together_and_come_back_in_their_order() -> None:
    x = torch.arange(5.0)
    calls: list[list[int]] = []

    def forward(rows: list[int]) -> torch.Tensor:
        calls.append(rows)
        return x[rows] * 10

    assert torch.equal(in_groups("abacb", forward), torch.tensor([0.0, 10, 20, 30, 40]))
    assert calls == [[0, 2], [1, 4], [3]]
    calls.clear()
    assert torch.equal(in_groups("aaaaa", forward), x * 10)
    assert calls == [[0, 1, 2, 3, 4]]
