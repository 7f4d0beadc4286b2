"""Learning rates by part of the model, against torch's AdamW with groups; frozen parts."""

import pytest
import torch
import torch.distributed as dist
from fsdp2_toy import Clipped, ToyModel, gradients, make_backend, make_track, settings
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard, distribute_tensor
from toy_denoiser import Judged, make_steps
from unirl.backends.fsdp2.config import AverageConfig, CriticConfig, LoraSettings
from unirl.core.errors import CheckpointError, RecipeError
from unirl.core.roles import Job
from unirl.train_host.optimizer import Optimizer
from unirl.train_host.sharding import full

SCALES = {r"^blocks\.0\.up": 0.25, r"blocks\.0": 3.0, "^leave": 0.1}


def by_hand(name):
    """Factor of `SCALES` for a name of the toy, without its patterns."""
    if name.startswith("blocks.0."):
        return 0.25 if name.startswith("blocks.0.up.") else 3.0
    return 0.1 if name.startswith("leave.") else 1.0


def whole(backend):
    return {name: full(param) for name, param in backend._params.items()}


@pytest.mark.parametrize("shard", ["auto", "always"])
@pytest.mark.parametrize("trains", ["full", "lora"])
def test_steps_are_those_of_torchs_adamw_with_groups_bit_for_bit(trains, shard):
    """With a schedule and weight decay, which scales with the rate. `lr` is reported without a factor."""
    targets = LoraSettings(rank=4, alpha=6.0, targets=["up", "down", "leave"])
    own = {"lora": targets, "lr": 1e-2, "lr_warmup_steps": 2, "weight_decay": 0.1, "max_grad_norm": None}
    backend, _ = make_backend(trains=trains, shard=shard, lr_scales=SCALES, **own)
    params = {name: torch.nn.Parameter(value) for name, value in whole(backend).items()}
    groups = [
        {"params": [param for name, param in params.items() if by_hand(name) == scale], "scale": scale}
        for scale in (1.0, 0.25, 3.0, 0.1)
    ]
    assert all(group["params"] for group in groups if trains == "full" or group["scale"] != 1.0)
    adam = torch.optim.AdamW([group for group in groups if group["params"]], weight_decay=0.1, fused=True)
    for step, rate in enumerate((0.5e-2, 1e-2, 1e-2)):
        caught = gradients(backend, make_track(ToyModel(), seed=step), Clipped())
        for name, param in params.items():
            param.grad = caught[name]
        for group in adam.param_groups:
            group["lr"] = rate * group["scale"]
        adam.step()
        assert all(torch.equal(value, params[name]) for name, value in whole(backend).items())
    report = backend.train([Job(track=make_track(ToyModel()), algorithm=Clipped())], progress=0.0)
    assert report.only["lr"] == 1e-2
    backend.close()


def test_parameters_on_several_meshes_are_scaled():
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    meshes = [init_device_mesh("cpu", sizes) for sizes in ((1,), (1, 1))]
    random = torch.Generator().manual_seed(0)
    values, grads = ([torch.randn(6, 10, generator=random) for _ in range(4)] for _ in range(2))

    def laid_out(tensor, number):
        mesh = meshes[number % 2]
        return distribute_tensor(tensor.clone(), mesh, [Shard(0)] * mesh.ndim)

    params = {str(number): torch.nn.Parameter(laid_out(value, number)) for number, value in enumerate(values)}
    optimizer = Optimizer(params, settings(lr=1e-2), total_steps=1)
    factors = (1.0, 1.0, 0.5, 0.5)
    optimizer.scale_rates(dict(zip(params, factors, strict=True)))
    for number, param in enumerate(params.values()):
        param.grad = laid_out(grads[number], number)
    optimizer.step()
    for value, grad, factor, param in zip(values, grads, factors, params.values(), strict=True):
        plain = torch.nn.Parameter(value.clone())
        plain.grad = grad.clone()
        torch.optim.AdamW([plain], lr=1e-2 * factor, weight_decay=0.0, fused=True).step()
        assert torch.equal(full(param), plain)
    dist.destroy_process_group()


def test_the_critic_is_not_scaled():
    backend, _ = make_backend(lr_scales={"blocks": 0.5}, critic=CriticConfig(lr=3e-2))
    backend.train([Job(track=make_steps(), algorithm=Judged())], progress=0.0)
    (critic,), (policy,) = (one.adams[0].param_groups for one in (backend._critic.optimizer, backend._optimizer))
    assert (critic["lr"], policy["lr"]) == (3e-2, 0.5e-2)
    backend.close()


@pytest.mark.parametrize("shard", ["auto", "always"])
@pytest.mark.parametrize("trains", ["full", "lora"])
def test_a_factor_of_0_freezes_a_part_and_changes_no_gradient_of_the_others(trains, shard):
    base = {name: param.clone() for name, param in ToyModel().net.named_parameters()}
    average = AverageConfig(kind="constant", decay=0.5)
    backend, _ = make_backend(trains=trains, shard=shard, ema=average, lr_scales={r"blocks\.0": 0.0})
    other, _ = make_backend(trains=trains, shard=shard)
    held = {name: full(param) for name, param in backend._held.items()}
    with torch.no_grad():
        for name, param in other._held.items():
            param.copy_(
                distribute_tensor(held[name], param.device_mesh, param.placements) if shard == "always" else held[name]
            )
    frozen = {name for name in other._params if name.startswith("blocks.0.")}
    assert len(frozen) == 4 and backend._params.keys() == other._params.keys() - frozen
    assert backend.num_trainable == sum(other._params[name].numel() for name in backend._params)
    for seed in (1, 2):
        result, expected = (gradients(one, make_track(ToyModel(), seed=seed), Clipped()) for one in (backend, other))
        if seed == 1:
            assert result.keys() == expected.keys() - frozen
            assert all(torch.equal(result[name], expected[name]) for name in result)
    assert not any("blocks.0." in name for name in backend._optimizer.moments(create=True))
    for name, param in backend._held.items():
        assert torch.equal(full(param), held[name]) == (name not in backend._params), name
    for policy in ("live", "ema"):
        exported = backend.export_weights(kind="merged", policy=policy).tensors
        assert exported.keys() == base.keys()
        # LoRA adapts `up.weight` and `down.weight` of blocks.
        moves = {name for name in base if "blocks.0." not in name}
        moves -= set() if trains == "full" else {name for name in base if "blocks.1." not in name or "bias" in name}
        for name, tensor in exported.items():
            assert torch.equal(tensor, base[name]) == (name not in moves), name
    for one in (backend, other):
        one.close()


def test_parts_frozen_by_their_rate_are_sent_in_the_dtype_that_receivers_expect():
    """fp32, as all that the model lets train: where no backend is, nothing else is known."""
    model = ToyModel()
    model.net.to(torch.bfloat16)
    base = {name: param.detach().clone() for name, param in model.net.named_parameters()}
    backend, _ = make_backend(model, trains="full", mixed_precision="bf16", lr_scales={"blocks": 0.0})
    backend.train([Job(track=make_track(ToyModel()), algorithm=Clipped())], progress=0.0)
    tensors = backend.export_weights(kind="full").tensors
    backend.close()
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert all(torch.equal(tensors[name], base[name].float()) for name in base if name.startswith("blocks."))


def test_frozen_adapters_are_sent_saved_and_need_no_wrapper(tmp_path):
    """LoRA-FA: A stays as it was drawn, and is part of a checkpoint, as the base checkpoint does not have it."""
    model = ToyModel()
    model.net.to(torch.bfloat16)
    settings = {"mixed_precision": "bf16", "lr_scales": {"lora_A": 0.0}}
    backend, _ = make_backend(model, **settings)
    assert not isinstance(model.net, FSDPModule)
    before = dict(backend.export_weights(kind="lora").tensors)
    backend.train([Job(track=make_track(model), algorithm=Clipped())], progress=0.0)
    after = backend.export_weights(kind="lora")
    assert after.tensors.keys() == before.keys()
    for name, tensor in after.tensors.items():
        assert torch.equal(tensor, before[name]) == (".lora_A." in name), name
    backend.save(tmp_path)

    drawn = ToyModel()
    drawn.net.to(torch.bfloat16)
    resumed, _ = make_backend(drawn, **settings)
    with torch.no_grad():
        for param in resumed._held.values():
            param.mul_(2)
    resumed.load(tmp_path)
    assert resumed.export_weights(kind="lora").checksum == after.checksum


def test_a_checkpoint_of_patterns_in_another_order_is_refused(tmp_path):
    scales = {"up": 0.5, "blocks": 0.1}
    backend, _ = make_backend(lr_scales=scales)
    backend.save(tmp_path)
    other, _ = make_backend(lr_scales={r"blocks\.0": 0.1, "up": 0.5})
    with pytest.raises(CheckpointError, match=r"made with lr_scales = \[\['up', 0.5\], \['blocks', 0.1\]\]"):
        other.load(tmp_path)


@pytest.mark.parametrize(
    ("trains", "scales", "expected"),
    [
        (
            "full",
            {"blokcs": 0.1},
            r"blokcs: got a pattern that matches no trainable parameter of ToyNet, .*'blocks.\d.",
        ),
        # With LoRA the base is frozen.
        (
            "lora",
            {r"up\.weight": 0.1},
            r"up\\.weight: got a pattern that matches no trainable .*'blocks.\d.up.lora_",
        ),
        (
            "lora",
            {"lora": 0.1, "lora_A": 0},
            r"lora_A: got a pattern that matches 4 trainable parameters of ToyNet, such",
        ),
        ("full", {"blocks": 0, ".": 0}, r"\.: got 0, which freezes the last of the 12 trainable parameters of ToyNet"),
        ("full", {"blocks": -1.0}, "blocks: got -1.0, expected 0 or more. It is a factor of `lr`; 0 freezes."),
        (
            "full",
            {"(": 1.0},
            r"\(: got '\(', expected a regular expression; Python reports: missing \), unterminated subpattern",
        ),
    ],
)
def test_patterns_and_factors_that_cannot_be_are_refused_before_training(trains, scales, expected):
    with pytest.raises(RecipeError, match=f"^backend.lr_scales.{expected}"):
        make_backend(trains=trains, lr_scales=scales)
