"""The rules of the pretended device, and what a training step may wait for and copy on a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import Any

import pytest
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
