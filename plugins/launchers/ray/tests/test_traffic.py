"""Bytes that the driver carries and that a weight transfer sends, counted in runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_runs import run, steps, tensors
from unirl.launchers.ray.traffic import Traffic

APART = ("launcher=ray", "launcher.placement=separate", "launcher.rollout_workers=2", "run.max_steps=2")


def test_counts_are_those_since_they_were_last_taken() -> None:
    traffic = Traffic()
    traffic.sent(b"12345")
    traffic.received(b"123")
    traffic.made(2)
    traffic.media([torch.zeros(3)])
    assert traffic.take() == {
        "driver/sent_bytes": 5,
        "driver/received_bytes": 3,
        "driver/media_bytes": 12,
        "driver/bytes_per_sample": 4,
    }
    assert traffic.take() == {}


@pytest.mark.slow
@pytest.mark.nightly
def test_the_driver_carries_less_than_4_kb_a_sample_at_any_image_size(tmp_path: Path, ray_here: None) -> None:
    carried: list[float] = []
    for side in (64, 128):
        # Shapes are read from pictures of 64 pixels a side alone.
        size = (f"sampling.height={side}", f"sampling.width={side}", "~reward@reward.shapes")
        folder = run(tmp_path / str(side), *APART, *size).folder
        numbers = steps(folder)[2]
        # Of one image alone: 3 channels of fp32. It does not come this way.
        assert numbers["driver/bytes_per_sample"] < 4096 < 3 * 4 * side**2
        assert "driver/media_bytes" not in numbers
        carried.append(numbers["driver/sent_bytes"] + numbers["driver/received_bytes"])
    # Four times the pixels; what differs are the digits of a few sizes.
    assert abs(carried[1] - carried[0]) < 0.01 * carried[0]


@pytest.mark.slow
@pytest.mark.nightly
def test_a_lora_sync_sends_the_adapter_and_hardly_more(tmp_path: Path, ray_here: None) -> None:
    words = ("backend.trains=lora", "backend.lora.rank=256", "backend.lora.alpha=256")
    folder = run(tmp_path / "run", *APART, *words).folder
    saved = {name: value for name, value in tensors(folder, 2).items() if name.startswith("/weights/")}
    assert saved and all("lora_" in name for name in saved)
    adapter_bytes = sum(value.numel() * 4 for value in saved.values())
    for numbers in steps(folder).values():
        # To each of two workers.
        assert numbers["sync/tensors"] == 2 * len(saved)
        assert 2 * adapter_bytes < numbers["sync/bytes"] < 2 * adapter_bytes * 1.01
        assert numbers["sync/seconds"] > 0
        assert numbers["logp_mismatch_max"] < 1e-5


@pytest.mark.slow
@pytest.mark.nightly
def test_stages_of_one_engine_are_sent_the_weights_once(tmp_path: Path, ray_here: None) -> None:
    """A plan and its image, by one worker: as many tensors as the model has, a few frozen ones included, and not twice as
    many."""
    small = (
        "data.prompts_per_step=2", "data.eval=''", "stages.plan.samples=2", "stages.image.samples=2",
        "sampling.image.num_inference_steps=4", "run.media_every=0", "run.keep=0", "~tracker.report",
    )  # fmt: skip
    words = (*APART, "launcher.rollout_workers=1")
    folder = run(tmp_path / "run", *words, recipe="quickstart-unified", small=small).folder
    weights = [name for name in tensors(folder, 2) if name.startswith("/weights/")]
    assert weights
    for numbers in steps(folder).values():
        assert len(weights) <= numbers["sync/tensors"] < 1.1 * len(weights)
        for stage in ("plan", "image"):
            assert numbers[f"{stage}/logp_mismatch_max"] < 1e-5
