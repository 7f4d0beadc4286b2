"""The rules of the pretended device, and what a training step may wait for and copy on a device."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ZImageTransformer2DModel
from pretended_device import DeviceMismatch, Event, PretendedDevice, own_process
from pretended_runs import recipe_step, statements

Run = Callable[..., Any]

SYNCS = {
    "x + 1": 0,
    "x[1:, 0] * torch.tensor(2.0)": 0,
    "x[torch.tensor([0], device=x.device)] = 1": 0,
    "x.to(torch.float64).sum(dim=1).softmax(0)": 0,
    "torch.nn.Linear(4, 2, device=x.device)(x).sum().backward()": 0,
    "x.sum().item()": 1,
    "float(x[0, 0])": 1,
    "bool((x > 0).all())": 1,
    "x.tolist()": 1,
    "x.cpu()": 1,
    "x.nonzero()": 1,
    "x.unique()": 1,
    "x[x > 3]": 1,
    "x[torch.tensor([0])]": 1,
}
MISMATCHES = (
    "x + torch.ones(4)",
    "torch.cat([x, torch.ones(1, 4)])",
    "torch.stack([x.sum(), torch.tensor(1.0)])",
    "x.index_select(0, torch.tensor([0]))",
    "torch.ones(3)[x[0].long()]",
    "x[torch.tensor([0], device=x.device)] = torch.ones(4)",
    "torch.randn(2, generator=torch.Generator(), device=x.device)",
    "torch.nn.Linear(4, 2)(x)",
)


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    with own_process() as process:
        yield process


@pytest.fixture(scope="module")
def measured(process: ProcessPoolExecutor, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., PretendedDevice]:
    """A step of SD3 with Flow-GRPO in bf16 with LoRA, guidance and KL: 8 samples of 6 steps in one update."""
    folder = tmp_path_factory.mktemp("miniatures")
    common = (
        "data.prompts_per_step=2",
        "data.samples_per_prompt=4",
        "train.updates_per_step=1",
        "sampling.num_inference_steps=6",
        "sampling.guidance_scale=4.5",
        "algorithm.kl_coef=0.04",
    )

    @cache
    def step(*, micro_batches: int, sde_steps: int) -> PretendedDevice:
        words = (f"train.micro_batch_size={8 // micro_batches}", f"sampling.sde.count={sde_steps}")
        metrics, device = process.submit(recipe_step, "sd3/flow-grpo", folder, *common, *words).result()
        assert metrics["updates"] == 1
        return device

    return step


@pytest.mark.parametrize("code", SYNCS)
def test_waits_of_the_host_are_counted(code: str, process: ProcessPoolExecutor) -> None:
    assert process.submit(statements, code).result().num_syncs() == SYNCS[code]


@pytest.mark.parametrize("code", MISMATCHES)
def test_what_mixes_the_devices_is_refused_with_the_operation_and_the_place(
    code: str, process: ProcessPoolExecutor
) -> None:
    with pytest.raises(DeviceMismatch, match=r"^aten\.\w+\.\w+: .*, at .+:\d+$"):
        process.submit(statements, code).result()


def test_bytes_are_counted_in_each_direction(process: ProcessPoolExecutor) -> None:
    device = process.submit(statements, "x.cpu(); torch.ones(5).to(x.device); x[[0, 2]]; x.clone()").result()
    # 12 fp32; 5 fp32 and 2 int64.
    assert (device.num_bytes("d2h"), device.num_bytes("h2d")) == (12 * 4, 5 * 4 + 2 * 8)


@pytest.mark.slow
def test_a_micro_batch_and_an_sde_step_wait_for_nothing(measured: Run) -> None:
    short, long = measured(micro_batches=2, sde_steps=2), measured(micro_batches=4, sde_steps=3)
    assert short.syncs == long.syncs
    waits = Counter[str]()
    for event, number in of_training(long.syncs):
        waits[event.place.partition(":")[0]] += number
    assert waits == {
        # Once an update, for all metrics of its micro-batches together.
        "numerics/loss/tally.py": 1,
        # Once a step, before the first update: a mismatch beyond its bound stops the run there.
        "numerics/train/log_prob_mismatch.py": 1,
        # Once an update for each loss term, `policy` and `kl`: their weights must be those that were announced.
        "numerics/train/stack.py": 2,
        # Once an update: the norm and the factor of the clipping.
        "train_host/optimizer.py": 1,
    }


def test_a_micro_batch_moves_its_numbers_alone(measured: Run) -> None:
    for micro_batches, steps in ((2, 2), (4, 3)):
        device = measured(micro_batches=micro_batches, sde_steps=steps)
        copied = Counter[str]()
        for event, size in of_training(device.transfers):
            copied[event.what] += size
        # To the device, for the old log-probs and for the loss: of each of 8 samples 4 fp32, and its steps and at most
        # two positions of each and the end in int64; of each micro-batch the schedule, 7 fp32. No latents, and no
        # conditions.
        assert 0 < copied["h2d"] <= 2 * (8 * (4 * 4 + (3 * steps + 1) * 8) + micro_batches * 7 * 4)
        # Back, of each step of a micro-batch, in fp64: 10 numbers of 6 metrics and 3 of the mismatch; once 2 weights, and
        # two fp32 of the clipping.
        assert copied["d2h"] <= micro_batches * steps * (10 + 3) * 8 + 2 * 8 + 2 * 4


def of_training(counts: Counter[Event]) -> Iterator[tuple[Event, int]]:
    places = ("algorithms/", "numerics/loss/", "numerics/train/", "train_host/", "core/types/batch.py")
    return ((event, number) for event, number in counts.items() if event.place.startswith(places))


@pytest.mark.slow
def test_blocks_in_cpu_memory_are_copied_once_a_pass_and_nothing_waits_for_them(
    process: ProcessPoolExecutor, tmp_path: Path
) -> None:
    """Z-Image's four blocks, of which the second, of the text's refiner, is smaller. What copies is counted, and an
    operation on a weight that is not on the device would mix the two."""
    common = (
        *("data.prompts_per_step=2", "data.samples_per_prompt=4", "sampling.guidance_scale=1"),
        *("sampling.num_inference_steps=5", "sampling.sde.count=2", "train.updates_per_step=2"),
        *("train.micro_batch_size=2", "train.old_log_probs=replay"),
    )
    words = ("z-image/flow-grpo", tmp_path, *common)
    expected, whole = process.submit(recipe_step, *words).result()
    metrics, device = process.submit(recipe_step, *words, "backend.offload_frozen=blocks").result()
    assert {name: value for name, value in metrics.items() if not name.startswith("perf/")} == {
        name: value for name, value in expected.items() if not name.startswith("perf/")
    }
    assert device.syncs == whole.syncs
    (config,) = tmp_path.glob("miniatures/z-image*/transformer/config.json")
    with torch.device("meta"):
        net = ZImageTransformer2DModel.from_config(json.loads(config.read_text()))
    parts = [part for part in net.modules() if type(part).__name__ == "ZImageTransformerBlock"]
    # In bf16, each weight from a multiple of 256 bytes on.
    sizes = [sum(-(-2 * param.numel() // 256) * 256 for param in part.parameters()) for part in parts]
    # Without gradient: five steps of the rollout, and of four micro-batches two steps of old log-probs. With it, those of
    # training: a forward begins with the first two blocks there and ends with the last two, where its backward begins.
    forwards, pairs = 5 + 4 * 2, 4 * 2
    copied = forwards * sum(sizes) + pairs * (sum(sizes[2:]) + sum(sizes[:-2]))
    # The first block was copied before the first pass, not while the one before it computed; and the first pass with a
    # gradient begins with the first block there and not the second.
    copied += sizes[0] + sizes[1]
    assert sum(size for event, size in device.transfers.items() if "block_offload" in event.place) == copied
