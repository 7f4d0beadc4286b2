"""Frozen weights of blocks in CPU memory: the numbers of a model that is whole on its device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from fsdp2_toy import SPEC, Clipped, ToyBlock, ToyModel, gradients, make_backend, make_track
from torch import Tensor, nn
from unirl.backends.fsdp2.config import AverageConfig
from unirl.core.errors import RecipeError, RunFailed
from unirl.core.roles import Job
from unirl.core.specs.config import TrainConfig
from unirl.train_host.block_offload import OffloadedBlocks

OFFLOADED: Mapping[str, Any] = {"offload_frozen": "blocks"}


def deep(num_blocks: int, *, widen: int = 1) -> ToyModel:
    """A toy with other numbers of blocks than the two that are on the device, each wider than the one before it."""
    model = ToyModel()
    with torch.random.fork_rng():
        torch.manual_seed(5)
        blocks = [ToyBlock() for _ in range(num_blocks)]
        for index, block in enumerate(blocks):
            width = 24 + widen * index
            block.up, block.down = nn.Linear(12, width), nn.Linear(width, 12)
    model.net.blocks = nn.ModuleList(blocks)
    return model


def trained(num_blocks: int, *, widen: int = 1, **settings: Any) -> tuple[Any, ToyModel]:
    """A backend after two updates with an average."""
    train = TrainConfig(updates_per_step=2, micro_batch_size=3, replay=settings.pop("replay", "auto"))
    averaged = {"ema": AverageConfig(kind="constant", decay=0.5), "train": train, **settings}
    backend, model = make_backend(deep(num_blocks, widen=widen), **averaged)
    report = backend.train([Job(track=make_track(model), algorithm=Clipped(to="ema"))], progress=0.0)
    assert report.num_updates == 2
    return backend, model


def outputs(backend: Any, model: ToyModel) -> dict[str, Tensor]:
    """What sampling and exports give: a velocity of each policy, and merged weights."""
    track, result = make_track(model), dict[str, Tensor]()
    for policy in ("live", "reference", "ema"):
        with backend.policy(policy), torch.no_grad():
            x, text = track.latent.latents[:, 0], track.conditions["positive"].expanded()
            result[f"velocity/{policy}"] = model.velocity(x, torch.full((8,), 0.5), text)
        merged = backend.export_weights(policy=policy, kind="merged").tensors
        result |= {f"{policy}/{name}": merged[name] for name in merged}
    return result


def assert_equal(result: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert result.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(result[name], expected[name])] == []


@pytest.mark.parametrize("num_blocks", [1, 2, 5, 6])
@pytest.mark.parametrize("replay", ["serial", "stacked"])
@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
def test_samples_gradients_and_exports_are_those_of_the_whole_model(
    num_blocks: int, replay: str, recomputes: bool
) -> None:
    result: list[dict[str, Tensor]] = []
    for offloaded in ({}, OFFLOADED):
        settings = {"replay": replay, "activation_checkpointing": recomputes, **offloaded}
        backend, model = trained(num_blocks, **settings)
        # The gradients are those of one more update.
        result.append(outputs(backend, model) | gradients(backend, make_track(model), Clipped(to="reference")))
        backend.close()
    assert_equal(*result)


def test_weights_survive_a_checkpoint_and_a_stay_in_cpu_memory(tmp_path: Any) -> None:
    backend, model = trained(5, **OFFLOADED)
    expected = outputs(backend, model)
    backend.save(tmp_path)
    backend.offload()
    lora = backend.export_weights(kind="lora").tensors
    assert {name for name in lora} and {tensor.device.type for tensor in lora.values()} == {"cpu"}
    backend.onload()
    assert_equal(outputs(backend, model), expected)
    backend.close()
    # The run may go on without the setting.
    resumed, same = make_backend(deep(5), ema=AverageConfig(kind="constant", decay=0.5))
    resumed.load(tmp_path)
    assert_equal(outputs(resumed, same), expected)
    resumed.close()


def test_two_blocks_are_on_the_device_and_adapters_stay() -> None:
    """On the CPU, too, the two buffers are memories of their own."""
    backend, model = make_backend(deep(5), activation_checkpointing=True, **OFFLOADED)
    (held,) = [part for part in vars(backend).values() if isinstance(part, OffloadedBlocks)]
    params = {name: param.data_ptr() for name, param in model.net.named_parameters() if param.requires_grad}
    seen: list[list[int]] = []

    def note(block: int) -> None:
        ranges = [(buffer.data_ptr(), buffer.data_ptr() + len(buffer)) for buffer in held._buffers]
        places = [
            [any(start <= weight.data_ptr() < end for start, end in ranges) for weight in frozen(other)]
            for other in model.net.blocks
        ]
        assert all(places[block]) and all(len(set(one)) == 1 for one in places)
        seen.append([index for index, one in enumerate(places) if one[0]])

    def frozen(block: nn.Module) -> list[nn.Parameter]:
        return [param for param in block.parameters() if not param.requires_grad]

    for index, block in enumerate(model.net.blocks):
        # `forward`, which is called again in a backward pass, where hooks are not.
        block.up.register_forward_pre_hook(lambda *_, index=index: note(index))
    backend.train([Job(track=make_track(model), algorithm=Clipped())], progress=0.0)
    assert seen and max(map(len, seen)) <= 2
    sizes = [sum(-(-param.nbytes // 256) * 256 for param in frozen(block)) for block in model.net.blocks]
    # The even blocks and the odd ones.
    assert [len(buffer) for buffer in held._buffers] == [max(sizes[::2]), max(sizes[1::2])]
    after = {name: param.data_ptr() for name, param in model.net.named_parameters() if param.requires_grad}
    assert after == params and len(params) == 20
    backend.close()


@pytest.mark.parametrize("policy", ["live", "reference"])
def test_a_graph_of_several_forwards_has_the_weights_of_its_blocks(policy: str) -> None:
    """Rewards backpropagate through the sampler: forwards follow each other before a backward pass goes through all."""
    result: list[dict[str, Tensor]] = []
    for offloaded in ({}, OFFLOADED):
        backend, model = make_backend(deep(5), **offloaded)
        x, text = torch.linspace(-1, 1, 32).view(4, 2, 2, 2).requires_grad_(), {"text": torch.ones(4, 3)}
        latent = x
        with backend.policy(policy):
            for sigma in (0.9, 0.5, 0.1):
                latent = latent - 0.3 * model.velocity(latent, torch.full((4,), sigma), text)
            latent.square().sum().backward()
        grads = {name: param.grad for name, param in model.net.named_parameters() if param.grad is not None}
        assert x.grad is not None and bool(grads) == (policy == "live")
        result.append({"x": x.grad, **grads})
        backend.close()
    assert_equal(*result)


def test_weights_in_two_places_and_blocks_within_blocks() -> None:
    """A weight that two blocks share stays on the device. An inner block is part of the outer one."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(4, 4), ToyBlock()
            self.inner.up, self.inner.down = nn.Linear(4, 6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.first(x))

    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(*(Outer() for _ in range(4)))
    net[3].first.weight = net[0].first.weight
    net.requires_grad_(False)
    plain, x = copy.deepcopy(net), torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
    (expected,) = torch.autograd.grad(plain(x).square().sum(), x)
    blocks = [part for part in net.modules() if isinstance(part, Outer | ToyBlock)]
    OffloadedBlocks(net, blocks, device=torch.device("cpu"), fill=dict)
    for _ in range(2):
        (result,) = torch.autograd.grad(net(x).square().sum(), x)
        assert torch.equal(result, expected)
    assert net[3].first.weight is net[0].first.weight
    assert dict(net.named_parameters()).keys() == dict(plain.named_parameters()).keys()


def test_a_backward_pass_without_its_weights_is_an_error() -> None:
    """torch drops the hooks of a view that is changed in place. In place on what is no view they stay."""

    class Viewed(ToyBlock):
        is_view = True

        def forward(self, hidden: Tensor) -> Tensor:
            result = super().forward(hidden)
            return result.view(-1)[:].view(hidden.shape) if self.is_view else result

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Viewed() for _ in range(5)])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
                x.mul_(0.5)
            return x

    net, x = Net().requires_grad_(False), torch.linspace(-1, 1, 24).view(2, 12).requires_grad_()
    Viewed.is_view = False
    (expected,) = torch.autograd.grad(net(x).square().sum(), x)
    OffloadedBlocks(net, list(net.blocks), device=torch.device("cpu"), fill=dict)
    (result,) = torch.autograd.grad(net(x).square().sum(), x)
    assert torch.equal(result, expected)
    Viewed.is_view = True
    with pytest.raises(RunFailed, match=r"^backend\.offload_frozen: the backward pass of block 4 began without its"):
        torch.autograd.grad(net(x).square().sum(), x)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_blocks_take_the_weights_that_are_there() -> None:
    """The same kernels, so the same bits."""
    result: list[dict[str, Tensor]] = []
    for offloaded in ({}, OFFLOADED):
        torch.compiler.reset()
        backend, model = trained(5, compile="blocks", widen=0, **offloaded)
        result.append(outputs(backend, model) | gradients(backend, make_track(model), Clipped(to="reference")))
        backend.close()
    torch.compiler.reset()
    assert_equal(*result)


def test_a_wrapped_module_and_one_without_blocks_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"^backend\.offload_frozen: got blocks, but the module is wrapped"):
        make_backend(mixed_precision="bf16", **OFFLOADED)
    model = ToyModel(spec=dataclasses.replace(SPEC, wrap_blocks=()))
    with pytest.raises(RecipeError, match=r"^backend\.offload_frozen: the model's spec names no wrap_blocks"):
        make_backend(model, **OFFLOADED)


@pytest.mark.gpu
def test_on_a_gpu_two_blocks_are_there_and_the_numbers_are_those_of_the_whole_model() -> None:
    """The same kernels on the same shapes, so the same bits; copies that are not waited for would give others."""
    width, rows = 2048, 4096
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width)) for _ in range(8)))
    plain.requires_grad_(False)
    x = torch.randn(rows, width)

    def held() -> int:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    def gradient(net: nn.Module) -> Tensor:
        (result,) = torch.autograd.grad(net(own).square().mean(), own)
        return result

    own = x.to("cuda").requires_grad_()
    net = copy.deepcopy(plain).to("cuda")
    expected, empty = gradient(net), held() - sum(param.nbytes for param in net.parameters())
    one = sum(-(-param.nbytes // 256) * 256 for param in net[0].parameters())
    OffloadedBlocks(net, list(net), device=torch.device("cuda"), fill=dict)
    assert held() <= empty + expected.nbytes + 2**20
    assert all(param.is_pinned() for param in net.parameters())
    for _ in range(3):
        assert torch.equal(gradient(net), expected)
    assert held() <= empty + expected.nbytes + 2 * one + 2**20
