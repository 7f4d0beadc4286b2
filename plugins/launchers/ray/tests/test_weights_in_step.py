"""Tensors that train ranks gather together, one of which sends them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from unirl.core.errors import EchoMismatch
from unirl.core.types.weights import MadeTensors
from unirl.launchers.ray.weight_ends import _InStep

NAMES = ("b", "a", "c")


@pytest.fixture
def made() -> tuple[MadeTensors, list[str]]:
    """Three tensors, and the names of those that were made."""
    order: list[str] = []

    def make(name: str) -> torch.Tensor:
        order.append(name)
        return torch.full((2,), float(ord(name)))

    forms = {name: torch.empty(2, device="meta") for name in NAMES}
    return MadeTensors({name: lambda name=name: make(name) for name in NAMES}, forms=forms), order


def test_a_rank_that_keeps_nothing_makes_all_in_the_order_of_their_names(made) -> None:
    tensors, order = made
    with _InStep(tensors):
        pass
    assert order == ["a", "b", "c"]


def test_a_sender_that_fails_makes_the_rest_for_the_ranks_that_wait(made) -> None:
    tensors, order = made
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(EchoMismatch, match="the receiver"), _InStep(tensors) as making:
            assert float(making["a"][0]) == ord("a")
            raise EchoMismatch("the receiver holds something else")
    finally:
        dist.destroy_process_group()
    assert order == ["a", "b", "c"]


def test_a_sender_of_its_own_makes_no_more_after_a_failure(made) -> None:
    tensors, order = made
    with pytest.raises(EchoMismatch), _InStep(tensors) as making:
        making["a"]
        raise EchoMismatch("the receiver holds something else")
    assert order == ["a"]


def test_another_order_is_found_at_once(made) -> None:
    tensors, order = made
    with (
        pytest.raises(AssertionError, match="'b' was asked for, but 'a' is next on all ranks"),
        _InStep(tensors) as making,
    ):
        making["b"]
    assert order == []


def test_a_look_at_shapes_makes_nothing(made) -> None:
    tensors, order = made
    with pytest.raises(AssertionError), _InStep(tensors) as making:
        assert [form.nbytes for form in making.forms.values()] == [8, 8, 8] and len(making) == 3
        raise AssertionError
    assert order == []
