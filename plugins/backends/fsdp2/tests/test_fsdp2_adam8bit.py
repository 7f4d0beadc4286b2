"""AdamW with moments in 8 bits, through torchao, on weights large enough to be quantized."""

import pytest
import torch
from fsdp2_toy import Clipped, ToyModel, make_backend, make_track
from unirl.core.errors import RecipeError
from unirl.core.roles import Job
from unirl.train_host import sharding
from unirl.train_host.adam_8bit import adam_8bit
from unirl.train_host.sharding import local

pytestmark = [pytest.mark.slow, pytest.mark.torchao]

WIDTH = 512
"""Of the blocks: their weights have 12 x 512 elements, 24 scales."""
LARGEST_ERROR = {"exp_avg": 0.9 / 64 / 2, "exp_avg_sq": 0.9 / 128 / 2}
"""Of a code, as a fraction of the largest of its block. The dynamic map (arXiv 2110.02861) spends most codes on
[0.1, 1]: with a sign 64 equal intervals, without 128, each represented by its middle."""


class Wide(ToyModel):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            for block in self.net.blocks:
                block.up, block.down = torch.nn.Linear(12, WIDTH), torch.nn.Linear(WIDTH, 12)


def started(**changes):
    return make_backend(Wide(), trains="full", weight_decay=0.1, betas=[0.9, 0.95], **changes)[0]


def step(backend, seed):
    backend.train([Job(track=make_track(Wide(), seed=seed), algorithm=Clipped())], progress=0.0)


def weights(backend):
    return {name: local(param.detach()).clone() for name, param in backend._params.items()}


def names_of(backend, group):
    own = {id(param) for param in group["params"]}
    return [name for name, param in backend._params.items() if id(param) in own]


def moments(backend):
    """(name, key) -> a moment in fp32, and whether it is quantized."""
    result = {}
    for name, param in backend._params.items():
        state = backend._optimizer._adam_of[param].state[param]
        for key in LARGEST_ERROR:
            here = local(state[key])
            is_quantized = hasattr(here, "codes")
            if is_quantized:
                planned = backend._config.memory(None).optimizer_bytes / 2
                assert here.codes.nbytes + here.scale.nbytes == planned * here.numel()
            result[name, key] = (here.dequantize() if is_quantized else here.clone()), is_quantized
    return result


@pytest.mark.parametrize("shard", ["auto", "always"])
def test_the_first_update_is_that_of_adamw_and_its_moments_are_off_by_a_code_at_most(shard):
    plain, small = started(shard=shard), started(shard=shard, optimizer="adamw_8bit")
    for backend in (plain, small):
        step(backend, 0)
    # torchao computes in fp32 and quantizes what it keeps: rounding of fp32 in another order.
    for name, expected in weights(plain).items():
        torch.testing.assert_close(weights(small)[name], expected, rtol=1e-5, atol=1e-7)
    expected, quantized = moments(plain), 0
    for (name, key), (values, is_quantized) in moments(small).items():
        assert is_quantized == (values.numel() >= 4096)
        quantized += is_quantized
        size = 256 if is_quantized else values.numel()
        here, there = values.reshape(-1, size), expected[name, key][0].reshape(-1, size)
        bound = LARGEST_ERROR[key] if is_quantized else 1e-6
        # 1e-6: the levels themselves are fp32.
        assert ((here - there).abs() <= (bound + 1e-6) * there.abs().amax(1, keepdim=True)).all(), (name, key)
    assert quantized == 2 * 4  # two moments of the weights of two blocks
    for backend in (plain, small):
        backend.close()


@pytest.mark.parametrize("shard", ["auto", "always"])
def test_two_steps_a_resume_and_two_steps_are_four_steps_bit_for_bit(shard, tmp_path):
    settings = {"shard": shard, "optimizer": "adamw_8bit", "lr_schedule": "cosine", "lr_warmup_steps": 2}
    whole = started(**settings)
    for number in range(4):
        step(whole, number)
        if number == 1:
            whole.save(tmp_path / "two")
            whole.offload()
            whole.onload()
    resumed = started(**settings)
    resumed.load(tmp_path / "two")
    for number in (2, 3):
        step(resumed, number)
    for name, expected in weights(whole).items():
        assert torch.equal(weights(resumed)[name], expected), name
    assert all(is_quantized == (values.numel() >= 4096) for values, is_quantized in moments(resumed).values())
    for backend in (whole, resumed):
        backend.close()


def test_its_rate_follows_the_schedule():
    backend = started(optimizer="adamw_8bit", lr_warmup_steps=4)
    for number in range(2):
        step(backend, number)
        (group,) = backend._optimizer.adams[0].param_groups
        # Of fp32, in which torchao keeps it.
        assert float(group["lr"]) == pytest.approx(1e-2 * (number + 1) / 4, rel=1e-6)
    backend.close()


@pytest.mark.parametrize("shard", ["auto", "always"])
def test_rates_by_part_are_those_of_adamw(shard):
    scales = {r"blocks\.0": 0.1, "leave": 0.0}
    plain, small = (
        started(shard=shard, lr_scales=scales, optimizer=optimizer) for optimizer in ("adamw", "adamw_8bit")
    )
    for backend in (plain, small):
        step(backend, 0)
    rates = {
        name: float(group["lr"]) for group in small._optimizer.adams[0].param_groups for name in names_of(small, group)
    }
    # Of fp32, in which torchao keeps it.
    for name, rate in rates.items():
        assert rate == pytest.approx(1e-3 if name.startswith("blocks.0.") else 1e-2, rel=1e-6)
    assert rates.keys() == small._params.keys() and not any(name.startswith("leave.") for name in rates)
    for name, expected in weights(plain).items():
        torch.testing.assert_close(weights(small)[name], expected, rtol=1e-5, atol=1e-7)
    for backend in (plain, small):
        backend.close()


def test_without_a_compiler_the_setting_is_named(monkeypatch):
    def fails(function):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(sharding.torch, "compile", fails)
    params = {"weight": torch.nn.Parameter(torch.zeros(3))}
    config = started()._config
    with pytest.raises(RecipeError, match=r"^backend.optimizer: got 'adamw_8bit', but torch.compile fails on cpu here"):
        adam_8bit(params, config, total_steps=1)
