"""Forward passes on shapes: what they keep and how many operations they are, by hand for small networks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from unirl.model_host.shape_run import shapes_only

ROWS, WIDTH, INNER = 6, 8, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Block(), Block()])

    def forward(self, x):
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return x


KEPT = 4 * ROWS * (WIDTH + 2 * INNER)
"""Bytes kept of a block in full training: inputs of both layers, and that of the activation between them."""


def test_what_autograd_keeps_is_counted_and_nothing_is_allocated() -> None:
    with torch.device("meta"):
        net = Net()
    with shapes_only([net], blocks=list(net.blocks)) as size:
        result = net(torch.randn(ROWS, WIDTH))
    assert torch.equal(result, torch.zeros(ROWS, WIDTH))
    assert all(param.is_meta for param in net.parameters()), "they are as before"
    # The input of the first layer, and of two blocks.
    assert size.saved_bytes == 4 * ROWS * WIDTH + 2 * KEPT
    assert size.flops == 2 * ROWS * (WIDTH * WIDTH + 2 * 2 * WIDTH * INNER)


def test_blocks_that_are_computed_again_keep_their_inputs() -> None:
    net = Net()
    with shapes_only([net], blocks=list(net.blocks)) as size:
        net(torch.randn(ROWS, WIDTH))
    # The network's input, and the inputs of two blocks.
    assert size.kept_bytes == 3 * 4 * ROWS * WIDTH
    assert size.block_bytes == 4 * ROWS * 2 * INNER


def test_an_adapter_keeps_its_input_and_what_lies_between_its_factors() -> None:
    net = Net()
    layers = [block.down for block in net.blocks]
    with shapes_only([net], blocks=list(net.blocks), adapted=dict.fromkeys(layers, 2)) as size:
        net(torch.randn(ROWS, WIDTH))
    # Both: input of A and of B. The second block also has its activation's input to go back through.
    assert size.saved_bytes == 4 * ROWS * (2 * (INNER + 2) + INNER)


def test_frozen_parameters_keep_nothing() -> None:
    net = Net().requires_grad_(False)
    with shapes_only([net]) as size:
        net(torch.randn(ROWS, WIDTH))
    assert size.saved_bytes == 0


def test_attention_keeps_its_factors_and_counts_both_products() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x):
            q, k, v = (part[None, None] for part in self.qkv(x).chunk(3, dim=-1))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    net = Attention()
    with shapes_only([net]) as size:
        net(torch.randn(ROWS, WIDTH))
    assert size.flops == 2 * ROWS * WIDTH * 3 * WIDTH + 4 * ROWS * ROWS * WIDTH
    # x; q, k and v, which share one storage; the output; and a log-sum-exp per row.
    assert size.saved_bytes == 4 * ROWS * (WIDTH + 3 * WIDTH + WIDTH + 1)


@pytest.mark.parametrize("is_read", [True, False], ids=["length", "mask"])
def test_rows_that_a_mask_selects_are_those_of_its_values(is_read: bool) -> None:
    class Masked(Net):
        def forward(self, x, mask):
            x = self.into(x)
            return super().forward(x[: int(mask.sum())] if is_read else x[mask])

    net, mask = Masked(), torch.arange(ROWS) < 4
    with shapes_only([net]) as size:
        result = net(torch.randn(ROWS, WIDTH), mask)
    assert result.shape == (4, WIDTH)
    assert size.flops == 2 * ROWS * WIDTH * WIDTH + 2 * 4 * (WIDTH * WIDTH + 2 * 2 * WIDTH * INNER)


def test_a_network_that_routes_by_what_it_computes_cannot_be_run() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return x[x * self.gate > 0]

    with shapes_only([net := Router()]), pytest.raises(RuntimeError):
        net(torch.randn(3))
    assert net(torch.tensor([1.0, -1.0])).tolist() == [1.0], "it is as before"
