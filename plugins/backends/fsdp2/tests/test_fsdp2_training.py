"""The step itself: against torch's own AdamW, for any batching, wrapped or not, in any precision."""

import copy
import dataclasses
import math

import pytest
import torch
import torch.distributed as dist
from fsdp2_toy import SPEC, Clipped, ToyModel, gradients, make_backend, make_track, settings
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard, distribute_tensor
from toy_denoiser import Judged, make_steps
from unirl.backends.fsdp2.config import AverageConfig, CriticConfig
from unirl.core.errors import RecipeError, RunFailed
from unirl.core.roles import Job, Losses
from unirl.core.specs.config import TrainConfig
from unirl.core.types.track import Status
from unirl.numerics.diffusion.kernels import make_kernel
from unirl.numerics.diffusion.replay import replay
from unirl.train_host.optimizer import Optimizer, learning_rate
from unirl.train_host.ranks import Ranks
from unirl.train_host.sharding import DTYPES, full


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def relative(found, wanted):
    """Largest difference over all tensors, as a part of each one's largest entry."""
    assert found.keys() == wanted.keys()
    return max(float((found[n] - wanted[n]).abs().max() / wanted[n].abs().max()) for n in wanted)


@pytest.mark.parametrize("shard", ["auto", "always"])
def test_one_full_step_is_torchs_adamw_bit_for_bit(shard):
    model = ToyModel()
    track = make_track(model)
    bare = copy.deepcopy(model)
    bare.net.eval()

    adam = torch.optim.AdamW(bare.net.parameters(), lr=3e-3, betas=(0.9, 0.95), eps=1e-7, weight_decay=0.1, fused=True)
    segment = track.latent
    path = dict(latents=segment.latents, positions=segment.positions, sigmas=segment.sigmas)
    path |= dict(sde_steps=segment.sde_steps, kernel=make_kernel("flow-sde", eta=0.7))
    path["conditions"] = {"positive": track.conditions["positive"].expanded()}
    with torch.no_grad():
        old = replay(bare.velocity, **path).log_probs
    ratio = (replay(bare.velocity, **path).log_probs - old).exp()
    advantages = track.advantages[:, None]
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).sum() / ratio.numel()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(bare.net.parameters(), 0.05)
    adam.step()

    backend, model = make_backend(
        model, trains="full", shard=shard, lr=3e-3, betas=[0.9, 0.95], eps=1e-7, weight_decay=0.1, max_grad_norm=0.05
    )
    report = backend.train([Job(track=track, algorithm=Clipped())], progress=0.0)
    tensors = backend.export_weights(kind="full").tensors
    backend.close()

    expected = dict(bare.net.named_parameters())
    assert float(norm) > 0.05, "the case must clip"
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert report.only["grad_norm"] == float(norm)
    assert report.only["ratio_max_dev_first"] == 0.0
    assert backend.version == report.num_updates == 1


@pytest.mark.parametrize("meshes", [(), ((1,),), ((1,), (1, 1))], ids=["plain", "one mesh", "two meshes"])
def test_the_fused_step_is_the_loop_over_parameters_up_to_rounding(meshes, one_rank):
    """Whatever the parameters are laid out on; their state has the same keys."""
    rows = torch.Generator().manual_seed(0)
    values = [torch.randn(6, 10, generator=rows) for _ in range(4)]
    grads = [torch.randn(6, 10, generator=rows) for _ in range(4)]
    loop = [torch.nn.Parameter(value.clone()) for value in values]
    adam = torch.optim.AdamW(loop, lr=1e-2, weight_decay=0.1, foreach=False)

    built = [init_device_mesh("cpu", sizes) for sizes in meshes]

    def laid_out(tensor, number):
        if not built:
            return tensor.clone()
        mesh = built[number % len(built)]
        return distribute_tensor(tensor.clone(), mesh, [Shard(0)] * mesh.ndim)

    params = {str(number): torch.nn.Parameter(laid_out(value, number)) for number, value in enumerate(values)}
    optimizer = Optimizer(params, settings(lr=1e-2, weight_decay=0.1), total_steps=5)
    for _ in range(5):
        for number, (plain, param) in enumerate(zip(loop, params.values(), strict=True)):
            plain.grad, param.grad = grads[number].clone(), laid_out(grads[number], number)
        adam.step()
        optimizer.step()
    assert all(group["fused"] for own in optimizer.adams for group in own.param_groups)
    for plain, param in zip(loop, params.values(), strict=True):
        # Each step rounds the weight to 2^-24 of itself, and the update of 1e-2 at most a few times.
        torch.testing.assert_close(full(param), plain.detach(), rtol=5 * 2**-23, atol=5 * 2**-21 * 1e-2)
    assert set(optimizer.moments()) == {f"adam/{name}/{key}" for name in params for key in adam.state[loop[0]]}


@pytest.mark.parametrize("shard", ["auto", "always"])
def test_what_the_model_froze_stays_frozen_and_is_exported(shard):
    model = ToyModel()
    model.net.blocks[0].requires_grad_(False)
    before = {name: param.clone() for name, param in model.net.named_parameters()}
    backend, model = make_backend(model, trains="full", shard=shard)
    backend.train([Job(track=make_track(model), algorithm=Clipped())], progress=0.0)
    tensors = backend.export_weights(kind="full").tensors
    assert tensors.keys() == before.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, before[name]) == name.startswith("blocks.0."), name
    backend.close()


@pytest.mark.parametrize("trains", ["lora", "full"])
def test_no_micro_batch_changes_the_gradient(trains):
    result = {}
    for micro_batch_size in (0, 1, 2, 3, 4):
        backend, model = make_backend(train=TrainConfig(micro_batch_size=micro_batch_size), trains=trains)
        result[micro_batch_size] = gradients(backend, make_track(model), Clipped())
    # fp32 sums of 16 terms in another order: a few eps of 1.2e-7.
    assert max(relative(result[size], result[0]) for size in (1, 2, 3, 4)) < 1e-6


def test_serial_and_stacked_replay_give_one_gradient():
    result = {}
    for kind in ("serial", "stacked"):
        backend, model = make_backend(train=TrainConfig(replay=kind))
        result[kind] = gradients(backend, make_track(model), Clipped())
    assert relative(result["serial"], result["stacked"]) < 1e-6


def test_padding_and_rows_of_weight_0_change_nothing():
    backend, model = make_backend()
    track = make_track(model)
    expected = gradients(backend, track, Clipped())

    backend, model = make_backend()
    assert all(torch.equal(g, expected[n]) for n, g in gradients(backend, track.padded(11), Clipped()).items())

    rotten = make_track(model, num_rows=12)
    weights = torch.tensor([1.0] * 8 + [0.0] * 4)
    latents = rotten.latent.latents.clone()
    latents[8:] = math.nan
    mixed = dataclasses.replace(
        rotten, sample_weights=weights, segment=dataclasses.replace(rotten.latent, latents=latents)
    )
    backend, model = make_backend()
    alone = gradients(backend, mixed.select(range(8)), Clipped())
    backend, model = make_backend()
    assert all(torch.equal(g, alone[n]) for n, g in gradients(backend, mixed, Clipped()).items())


@pytest.mark.parametrize("trains", ["lora", "full"])
@pytest.mark.parametrize("policy", ["reference", "ema"])
def test_wrapped_on_one_rank_gives_the_same_bits_as_unwrapped(trains, policy):
    result = {}
    for shard in ("auto", "always"):
        backend, model = make_backend(
            trains=trains,
            shard=shard,
            reference_copy=trains == "full",
            ema=AverageConfig(kind="constant", decay=0.5),
            train=TrainConfig(updates_per_step=2, micro_batch_size=3),
        )
        track = make_track(model)
        # The second call compares with a reference and an average that differ from the live weights.
        backend.train([Job(track=track, algorithm=Clipped(to=policy))], progress=0.0)
        result[shard] = gradients(backend, track, Clipped(to=policy)), backend.export_weights(kind="merged").checksum
        backend.close()
    assert all(torch.equal(result["always"][0][name], grad) for name, grad in result["auto"][0].items())
    assert result["always"][1] == result["auto"][1]
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("recomputes", [False, True])
def test_adapters_on_a_base_in_the_dtype_of_mixed_precision_need_no_wrapper(precision, recomputes):
    """On one rank, for the same bits; a base that would have to be cast is wrapped."""
    result = {}
    for shard in ("auto", "always"):
        model = ToyModel()
        model.net.to(DTYPES[precision])
        backend, model = make_backend(
            model,
            shard=shard,
            mixed_precision=precision,
            activation_checkpointing=recomputes,
            ema=AverageConfig(kind="constant", decay=0.5),
            train=TrainConfig(updates_per_step=2, micro_batch_size=3),
        )
        assert isinstance(model.net, FSDPModule) == (shard == "always")
        track = make_track(model)
        for policy in ("reference", "ema"):
            backend.train([Job(track=track, algorithm=Clipped(to=policy))], progress=0.0)
        result[shard] = gradients(backend, track, Clipped(to="ema")), backend.export_weights(kind="merged").checksum
        backend.close()
    assert all(torch.equal(result["always"][0][name], grad) for name, grad in result["auto"][0].items())
    assert result["always"][1] == result["auto"][1]

    for changes in ({}, {"trains": "full"}):
        model = ToyModel()
        model.net.blocks.to(DTYPES[precision])
        backend, model = make_backend(model, mixed_precision=precision, **changes)
        assert isinstance(model.net, FSDPModule)
        backend.close()


def test_activation_checkpointing_changes_no_bit():
    plain, model = make_backend()
    expected = gradients(plain, make_track(model), Clipped(to="reference"))
    for shard in ("auto", "always"):
        backend, model = make_backend(activation_checkpointing=True, shard=shard)
        result = gradients(backend, make_track(model), Clipped(to="reference"))
        backend.close()
        assert all(torch.equal(result[name], expected[name]) for name in expected)


def test_bf16_computes_as_a_pipeline_in_bf16_and_keeps_fp32_masters():
    model = ToyModel()
    low = copy.deepcopy(model.net).to(torch.bfloat16).eval()
    seen = []
    backend, model = make_backend(model, trains="full", mixed_precision="bf16")
    model.net.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    model.net.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["timestep"].dtype), with_kwargs=True
    )
    x, sigma, text = torch.randn(3, 2, 2, 2), torch.tensor([1.0, 0.987, 0.988]), torch.randn(3, 3)
    with torch.no_grad():
        result = model.velocity(x, sigma, {"text": text})
        expected = low(x.flatten(1).bfloat16(), text.bfloat16(), sigma)
    assert torch.equal(result.flatten(1), expected.float())
    assert sorted(map(str, seen)) == ["torch.bfloat16", "torch.float32"]
    backend.train([Job(track=make_track(model), algorithm=Clipped())], progress=0.0)
    tensors = backend.export_weights(kind="full").tensors
    backend.close()
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


def test_a_bf16_model_gets_fp32_adapters():
    model = ToyModel()
    model.net.to(torch.bfloat16)
    backend, _ = make_backend(model)
    assert {param.dtype for param in backend._params.values()} == {torch.float32}
    assert model.net.enter.weight.dtype == torch.bfloat16


def test_fp32_adapters_on_a_bf16_base_train_in_bf16():
    model = ToyModel()
    model.net.to(torch.bfloat16)
    backend, model = make_backend(model, mixed_precision="bf16", activation_checkpointing=True)
    track = make_track(model)
    before = dict(backend.export_weights(kind="lora").tensors)
    report = backend.train([Job(track=track, algorithm=Clipped(to="reference"))], progress=0.0)
    after, merged = backend.export_weights(kind="lora").tensors, backend.export_weights(kind="merged").tensors
    backend.close()
    assert report.num_updates == 1 and report.only["ratio_max_dev_first"] == 0.0
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
    assert all(not torch.equal(after[name], before[name]) for name in before)


def test_fp16_skips_on_overflow_and_halves_its_scale():
    backend, model = make_backend(trains="full", mixed_precision="fp16")
    track = make_track(model)
    backend._optimizer.loss_scale = 2.0**40
    skipped = backend.train([Job(track=track, algorithm=Clipped())], progress=0.0)
    assert (skipped.num_skipped, backend.version, backend._optimizer.loss_scale) == (1, 0, 2.0**39)
    backend._optimizer.loss_scale = 2.0**10
    scaled = gradients(backend, track, Clipped())
    backend.close()
    plain, model = make_backend(trains="full")
    expected = gradients(plain, track, Clipped())
    # `gradients` catches them before they are unscaled.  fp16 has 11 bits; errors of some layers add up.
    for name, grad in expected.items():
        assert float((scaled[name] / 2.0**10 - grad).norm() / grad.norm()) < 2e-2


@pytest.mark.parametrize("shard", ["auto", "always"])
def test_no_gradient_is_kept_after_the_steps(shard):
    """Their memory is free during rollouts and exports."""
    backend, model = make_backend(shard=shard, critic=CriticConfig(lr=1e-2))
    report = backend.train([Job(track=make_steps(), algorithm=Judged())], progress=0.0)
    assert report.only["grad_norm"] > 0 and report.only["critic_grad_norm"] > 0
    params = [*model.net.parameters(), *backend._critic.net.parameters()]
    assert all(param.grad is None for param in params)
    backend.close()


def test_forwards_without_a_backward_pass_leave_no_record():
    """FSDP notes each forward until a backward pass ends: a teacher has none, nor has a policy that only samples."""

    def num_noted(module):
        parts = [part._get_fsdp_state() for part in module.modules() if isinstance(part, FSDPModule)]
        groups = {group for part in parts for group in part._comm_ctx.post_forward_order}
        return len(parts[0]._comm_ctx.post_forward_order) + sum(len(one._post_forward_indices) for one in groups)

    teacher = ToyModel(seed=1)
    teacher.net.requires_grad_(False)
    teacher.fill = lambda tensors: None
    plain, model = make_backend()
    track = make_track(model)
    expected = gradients(plain, track, Clipped())
    backend, model = make_backend(shard="always")
    backend.hold_frozen(teacher)
    # Before any forward there is no record.
    backend.adopt(backend.export_weights(kind="lora"))
    for own in (model, teacher):
        make_track(own)
        assert num_noted(own.net) > 0
    backend.adopt(backend.export_weights(kind="lora"))
    assert num_noted(model.net) == num_noted(teacher.net) == 0
    for own in (model, teacher):
        make_track(own)
    assert relative(gradients(backend, track, Clipped()), expected) == 0
    assert num_noted(model.net) == num_noted(teacher.net) == 0
    backend.close()


@pytest.mark.parametrize(("name", "expected"), [("cuda:1", [torch.device("cuda:1")]), ("cuda", []), ("cpu", [])])
def test_the_device_of_a_rank_is_the_current_one(name, expected, monkeypatch):
    """FSDP wraps modules on the current device, whatever the device of their weights."""
    calls = []
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    Ranks(torch.device(name), needs_group=False).close()
    assert calls == expected


def test_a_gradient_that_is_not_finite_is_skipped_and_counted():
    backend, model = make_backend(train=TrainConfig(updates_per_step=2), ema=AverageConfig(kind="constant"))
    track = make_track(model)
    advantages = track.advantages.clone()
    advantages[0] = math.inf  # row 0 goes to the first update
    before = {name: param.detach().clone() for name, param in backend._params.items()}
    steps = []
    original = backend._optimizer.step

    def step():
        report = original()
        steps.append((report, {n: p.detach().clone() for n, p in backend._params.items()}))
        return report

    backend._optimizer.step = step
    report = backend.train(
        [Job(track=dataclasses.replace(track, advantages=advantages), algorithm=Clipped())], progress=0.0
    )
    assert [entry.skipped for entry, _ in steps] == [True, False]
    assert all(torch.equal(steps[0][1][name], before[name]) for name in before)
    assert (report.num_updates, report.num_skipped, backend.version) == (1, 1, 1)
    assert backend._policies.copies["ema"].num_moves == 1
    assert math.isfinite(report.only["grad_norm"])


def test_gradients_near_adams_eps_are_reported():
    for eps, expected in ((1e-8, 0.0), (1.0, 1.0)):
        backend, model = make_backend(eps=eps)
        report = backend.train([Job(track=make_track(model), algorithm=Clipped())], progress=0.0)
        assert report.only["grad_rms_near_eps"] == expected


def test_a_loss_that_does_not_reach_the_weights_is_an_error():
    class Detached(Clipped):
        def loss(self, track, replay, *, progress):
            losses = super().loss(track, replay, progress=progress)
            free = torch.ones_like(losses.terms[0].values).requires_grad_()
            return Losses(terms=[dataclasses.replace(losses.terms[0], values=free)])

    backend, model = make_backend()
    with pytest.raises(RunFailed, match="none of the 8 weights"):
        backend.train([Job(track=make_track(model), algorithm=Detached())], progress=0.0)


def test_the_learning_rate_follows_its_schedule():
    config = settings(lr=2.0, lr_warmup_steps=4)
    assert [learning_rate(config, step, 10) for step in (0, 1, 3, 4, 9)] == [0.5, 1.0, 2.0, 2.0, 2.0]
    config = settings(lr=2.0, lr_warmup_steps=2, lr_schedule="linear", lr_min_ratio=0.5)
    # From 2 at step 2 to 1 at step 10.
    assert [learning_rate(config, step, 10) for step in (2, 6, 10, 99)] == [2.0, 1.5, 1.0, 1.0]
    config = settings(lr=2.0, lr_schedule="cosine")
    assert learning_rate(config, 0, 8) == 2.0
    assert learning_rate(config, 4, 8) == pytest.approx(1.0)
    assert learning_rate(config, 2, 8) == pytest.approx(1 + math.sqrt(0.5))
    assert learning_rate(config, 8, 8) == 0.0


def test_the_rate_of_each_update_is_reported_and_used():
    backend, model = make_backend(train=TrainConfig(updates_per_step=2), steps=2, lr=1e-2, lr_schedule="linear")
    first = backend.train([Job(track=make_track(model), algorithm=Clipped())], progress=0.0)
    second = backend.train([Job(track=make_track(model), algorithm=Clipped())], progress=1.0)
    # Steps 0 to 3 of 4: 1, 3/4, 1/2, 1/4 of the rate; the report is their mean over a call.
    assert first.only["lr"] == pytest.approx(0.875e-2)
    assert second.only["lr"] == pytest.approx(0.375e-2)


def test_wrong_settings_and_blocks_are_named():
    with pytest.raises(RecipeError, match=r"backend.trains: got 'half', expected one of lora, full"):
        make_backend(trains="half")
    with pytest.raises(RecipeError, match=r"backend.lr: got -1.0"):
        make_backend(lr=-1.0)
    with pytest.raises(RecipeError, match=r"wrap_blocks: got ToyBlok, .*Nearest: ToyBlock"):
        make_backend(ToyModel(spec=dataclasses.replace(SPEC, wrap_blocks=("ToyBlok",))))
    for key, value in (("activation_checkpointing", True), ("compile", "blocks")):
        with pytest.raises(RecipeError, match=f"backend.{key}: the model's spec names no wrap_blocks"):
            make_backend(ToyModel(spec=dataclasses.replace(SPEC, wrap_blocks=())), **{key: value})


def test_padding_is_never_a_finding_of_its_own():
    backend, model = make_backend()
    track = make_track(model)
    hidden = dataclasses.replace(
        track, sample_weights=track.sample_weights * 0, status=(Status.PADDING,) * track.num_rows
    )
    report = backend.train([Job(track=hidden, algorithm=Clipped())], progress=0.0)
    assert (report.num_updates, report.only["updates_empty"], backend.version) == (0, 1.0, 0)
