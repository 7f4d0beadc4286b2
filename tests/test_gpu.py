"""What only a CUDA device runs: the loop in other precisions, FSDP with NCCL, loss scaling, offloading, the optimizer.

Every expected value is the CPU's, or a formula. Further tests with the mark `gpu` stand beside those of their dist.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from toy_denoiser import Clipped, ToyModel, gradients, make_track
from unirl.backends.fsdp2.backend import build
from unirl.backends.fsdp2.config import AverageConfig, Fsdp2Config
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.roles import Job
from unirl.core.specs.config import TrainConfig
from unirl.loop.run import train
from unirl.train_host.optimizer import Optimizer
from unirl.train_host.sharding import local

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SMALL = [
    "data.prompts_per_step=4",
    "data.samples_per_prompt=4",
    "eval.num_prompts=2",
    f"run.device={DEVICE}",
    "~tracker.report",
]
EPS = {"bf16": 2.0**-8, "fp16": 2.0**-11}


@pytest.fixture(autouse=True)
def no_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """TF32 has 10 bits; torch's default allows it for convolutions, such as patch embeddings and VAEs."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture
def on_device() -> Iterator[Any]:
    """The toy denoiser in the fsdp2 backend on the device, all weights training; closed at the end."""
    backends: list[Any] = []

    def make(**settings: Any) -> Any:
        model: Any = ToyModel()
        model.net.to(DEVICE)
        model.device = torch.device(DEVICE)
        config = Fsdp2Config(**{"trains": "full", "lr": 1e-2, "max_grad_norm": None, **settings})
        backends.append(build(config, model=model, train=TrainConfig(), steps=10, seed=3))
        return backends[-1]

    yield make
    for backend in backends:
        backend.close()


@pytest.mark.parametrize(
    ("overrides", "bound"),
    [
        # fp32 rounding of log-probs of order 1, with other kernels chosen for other batch shapes.
        ([], 1e-5),
        # bf16 keeps 8 bits of the velocity; the log-prob averages its error over 256 elements.
        (["backend.mixed_precision=bf16", "train.logp_mismatch_max=0.1"], 0.1),
        (["model.autocast=bfloat16", "train.logp_mismatch_max=0.1"], 0.1),
        # Three bits more.
        (["backend.mixed_precision=fp16", "train.logp_mismatch_max=0.1"], 0.1 / 8),
    ],
    ids=["fp32", "bf16", "autocast", "fp16"],
)
def test_the_quickstart_runs_on_the_device_with_ratio_one(overrides: list[str], bound: float, tmp_path: Path) -> None:
    for metrics in two_steps(tmp_path, *overrides):
        assert metrics["ratio_max_dev_first"] == 0.0
        assert metrics["logp_mismatch_max"] < bound


def test_compiled_blocks_run_on_the_device(tmp_path: Path) -> None:
    """Kernels with and without gradients are compiled apart: log-probs of order 1 may differ by fp32 rounding."""
    for metrics in two_steps(tmp_path, "backend.compile=blocks"):
        assert metrics["ratio_max_dev_first"] < 1e-5
        assert metrics["logp_mismatch_max"] < 1e-5


def two_steps(folder: Path, *overrides: str) -> list[dict[str, float]]:
    catalog = Catalog.discover()
    plan = compose("quickstart", [*SMALL, "run.max_steps=2", f"run.dir={folder / 'run'}", *overrides], catalog=catalog)
    result = train(plan, catalog=catalog)
    lines = (result.folder / "events.jsonl").read_text().splitlines()
    steps = [event["metrics"] for event in map(json.loads, lines) if event["kind"] == "step"]
    assert len(steps) == 2
    return steps


@pytest.mark.parametrize("precision", ["none", "bf16", "fp16"])
def test_a_gradient_through_fsdp_on_one_rank_is_that_of_the_cpu(precision: str, on_device: Any) -> None:
    track = make_track(ToyModel())
    plain = build(
        Fsdp2Config(trains="full", max_grad_norm=None), model=ToyModel(), train=TrainConfig(), steps=10, seed=3
    )
    expected = gradients(plain, track, Clipped())
    plain.close()
    backend = on_device(mixed_precision=precision)
    if precision in EPS:
        assert "cuda:nccl" in dist.get_backend_config()
    scale = 2.0**10 if precision == "fp16" else 1.0
    backend._optimizer.loss_scale = scale
    result = gradients(backend, track, Clipped())
    # Four layers, forward and backward, and the loss: about sixteen roundings that add up. In fp32, other orders of sums.
    bound = 16 * EPS[precision] if precision in EPS else 1e-5
    assert result.keys() == expected.keys()
    for name, grad in expected.items():
        assert result[name].dtype == torch.float32
        assert float((result[name].cpu() / scale - grad).norm() / grad.norm()) < bound, name


def test_fp16_skips_on_overflow_and_halves_its_scale_on_the_device(on_device: Any) -> None:
    backend = on_device(mixed_precision="fp16")
    before = {name: local(param).detach().clone() for name, param in backend._params.items()}
    backend._optimizer.loss_scale = 2.0**40
    report = backend.train([Job(track=make_track(ToyModel()), algorithm=Clipped())], progress=0.0)
    assert (report.num_skipped, backend.version, backend._optimizer.loss_scale) == (1, 0, 2.0**39)
    assert all(torch.equal(local(param), before[name]) for name, param in backend._params.items())


@pytest.mark.parametrize("precision", ["none", "bf16"])
def test_offloaded_weights_leave_the_device_can_be_exported_and_train_on_as_before(
    precision: str, on_device: Any
) -> None:
    """With bf16 they are shards: the gathers of an export then start from CPU memory."""
    stays, moves = (
        on_device(mixed_precision=precision, ema=AverageConfig(kind="constant", decay=0.5)) for _ in range(2)
    )
    tracks = [make_track(ToyModel(), seed=seed) for seed in (1, 2)]
    for backend in (stays, moves):
        backend.train([Job(track=tracks[0], algorithm=Clipped())], progress=0.0)
    held = bytes_on_device()
    checksum = stays.export_weights(kind="full").checksum
    moves.offload()
    tensors = [*moves._module.parameters(), *moves._policies.copies["ema"].values.values()]
    assert {local(tensor).device.type for tensor in tensors} == {"cpu"}
    moments = [value for name, value in moves._optimizer.moments().items() if not name.endswith("/step")]
    assert {local(value).device.type for value in moments} == {"cpu"}
    # fp32: the weights, two moments and the average. Blocks of the allocator are at least as large.
    assert held - bytes_on_device() >= 4 * 4 * moves.num_trainable
    assert moves.export_weights(kind="full").checksum == checksum
    moves.onload()
    assert {local(tensor).device.type for tensor in moves._module.parameters()} == {DEVICE}
    for backend in (stays, moves):
        backend.train([Job(track=tracks[1], algorithm=Clipped())], progress=0.0)
    assert moves.export_weights(kind="full").checksum == stays.export_weights(kind="full").checksum != checksum


def bytes_on_device() -> int:
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def test_the_optimizer_on_the_device_is_adamw_by_its_formula() -> None:
    """Loshchilov and Hutter, Decoupled weight decay regularization, arXiv 1711.05101, algorithm 2; many tensors, as
    adapters are, which fused and batched loops take together."""
    lr, beta1, beta2, eps, decay = 1e-2, 0.9, 0.999, 1e-8, 0.1
    source = torch.Generator().manual_seed(0)
    shapes = [(5, 3), (7,), (1, 1)] * 40
    weights = [torch.randn(shape, generator=source, dtype=torch.float64) for shape in shapes]
    params = {f"{number}": weight.to(DEVICE, torch.float32) for number, weight in enumerate(weights)}
    config = Fsdp2Config(trains="full", lr=lr, betas=[beta1, beta2], eps=eps, weight_decay=decay, max_grad_norm=None)
    optimizer = Optimizer(params, config, total_steps=3)
    first, second = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    for step in range(1, 4):
        grads = [torch.randn(shape, generator=source, dtype=torch.float64) for shape in shapes]
        for param, grad in zip(params.values(), grads, strict=True):
            param.grad = grad.to(DEVICE, torch.float32)
        optimizer.step()
        for number, grad in enumerate(grads):
            first[number] = beta1 * first[number] + (1 - beta1) * grad
            second[number] = beta2 * second[number] + (1 - beta2) * grad**2
            mean, square = first[number] / (1 - beta1**step), second[number] / (1 - beta2**step)
            weights[number] = weights[number] * (1 - lr * decay) - lr * mean / (square.sqrt() + eps)
    for param, weight in zip(params.values(), weights, strict=True):
        # Three steps of a few fp32 roundings of weights up to 4; the moments' own move a step of 1e-2 by 1e-6 of it.
        torch.testing.assert_close(param.cpu().double(), weight, rtol=0, atol=4e-6)
