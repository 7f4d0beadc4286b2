"""Models that are built without values, for backends that fill in each rank's shards."""

from __future__ import annotations

import torch
from torch import nn
from unirl.conformance.claims import claim
from unirl.conformance.fixtures.model import ModelCase
from unirl.core.specs.capability import Cap


@claim("model", proves=Cap.LAZY_BUILD, track="any")
def test_a_lazy_build_is_filled_with_the_weights_of_an_eager_one(case: ModelCase) -> None:
    """Built lazily, the trainable module has no values. Filled, it is the one of an eager build, bit for bit: every
    parameter and buffer with its dtype, frozen and tied ones included. So a rank that keeps a part of a model can load
    that part alone.

    If it fails: build the module inside `unirl.model_host.lazy_weights.empty_parameters`, give its tensors the dtypes
    that they have when they are loaded, and fill it by `CheckpointValues`. A buffer that differs was made on the meta
    device; a tie that is lost was made before the parameters were replaced.
    """
    eager, lazy = case.fresh_model(), case.fresh_model(lazy=True)
    module = lazy.trainable
    valued = [name for name, param in module.named_parameters() if not param.is_meta]
    assert not valued, f"{len(valued)} parameters have values before `fill`, such as {valued[0]!r}"
    allocate(module, torch.device(case.device))
    lazy.fill(module.state_dict(keep_vars=True))
    expected, result = described(eager.trainable), described(module)
    assert result.keys() == expected.keys(), f"names differ: {sorted(result.keys() ^ expected.keys())[:3]}"
    for name, (tensor, facts) in expected.items():
        mine, my_facts = result[name]
        assert my_facts == facts, f"{name!r}: dtype, requires_grad and ties are {my_facts}, expected {facts}"
        assert torch.equal(mine, tensor.to(mine.device)), f"{name!r} has other values than in an eager build"


def allocate(module: nn.Module, device: torch.device) -> None:
    """Parameters on the meta device in memory, all of them NaN, and buffers on the device; ties are kept."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, param in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if param not in made:
                empty = torch.full_like(param, torch.nan, device=device)
                made[param] = nn.Parameter(empty, requires_grad=param.requires_grad)
            owner.register_parameter(name, made[param])
        for name, buffer in list(owner.named_buffers(recurse=False)):
            setattr(owner, name, buffer.to(device))


def described(module: nn.Module) -> dict[str, tuple[torch.Tensor, tuple[object, ...]]]:
    """Every parameter and buffer by name, with its dtype, whether it takes a gradient, and its first name."""
    first: dict[int, str] = {}
    result: dict[str, tuple[torch.Tensor, tuple[object, ...]]] = {}
    for name, tensor in [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]:
        facts = (tensor.dtype, tensor.requires_grad, first.setdefault(id(tensor), name))
        result[name] = (tensor.detach(), facts)
    return result
