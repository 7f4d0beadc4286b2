"""Runs whose images come from vLLM-Omni, on a CPU and in fp32."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from external_engines.environments import make
from external_engines.latents import ROUNDING
from hunyuan_runs import IMAGE_ALONE, SMALL, run
from unirl.core.errors import RunFailed
from unirl.core.types.request import Request
from unirl.core.types.track import Track
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.loop.checkpoints import Checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

RECIPE = "hunyuan-image3/flow-grpo"
WORDS = (
    *IMAGE_ALONE, "data.samples_per_prompt=3", "run.save_every=1", "sampling.guidance_scale=5",
    "sampling.guidance_mode=two-pass",
    # A mean of pixels: the size of a file would move with one that rounding takes to the next of 256 levels.
    "~reward.jpeg", "+reward@reward.light=brightness",
    # Weights of another version are then off by far more than rounding.
    "backend.lr=1e-2",
)  # fmt: skip


def test_an_engine_that_is_killed_ends_the_run_which_resumes_as_if_nothing_happened(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The published recipe, with adapters. Compared with a whole run in process."""
    make("vllm-omni")
    monkeypatch.chdir(tmp_path)
    folders = {name: tmp_path / name for name in ("whole", "struck")}
    for folder in folders.values():
        folder.mkdir()

    def steps(name: str, *words: str, resume: Path | None = None) -> list[Mapping[str, Any]]:
        monkeypatch.chdir(folders[name])
        return run(folders[name], tiny_folder, *WORDS, *words, recipe=RECIPE, has_sources=False, resume=resume)

    expected = steps("whole")
    generate = ExternalLatentEngine.generate

    def struck(engine: ExternalLatentEngine, request: Request) -> Track:
        if request.rollout == 1:
            os.kill(engine._process.pid, signal.SIGKILL)
        return generate(engine, request)

    with monkeypatch.context() as patched:
        patched.setattr(ExternalLatentEngine, "generate", struck)
        with pytest.raises(RunFailed, match=r"engine 'vllm-omni'.*(died|ended|is not running)"):
            steps("struck", "engine=vllm-omni")
    folder = folders["struck"] / "out"
    assert Checkpoints(folder / "checkpoints").load().step == 1
    result = steps("struck", "engine=vllm-omni", resume=folder)
    assert len(result) == len(expected) == 2
    for one, other in zip(result, expected, strict=True):
        # Of bf16 or of other weights it would be thousands of times as much.
        assert one["logp_mismatch_max"] <= ROUNDING and one["grad_norm"] > 0
        # Rounding of a forward, in rewards whose standard deviations advantages are divided by, 0.001 and more.
        assert one["reward_mean"] == pytest.approx(other["reward_mean"], abs=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-2)


def test_an_image_of_the_engine_continues_a_thought_that_trains_in_the_same_step(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From source images of different sizes, with all weights."""
    make("vllm-omni")
    monkeypatch.chdir(tmp_path)
    steps = run(tmp_path, tiny_folder, *SMALL, "backend.trains=full", "engine@engine.image=vllm-omni")
    assert len(steps) == 2
    for step in steps:
        for track in ("think", "image"):
            assert step[f"{track}/logp_mismatch_max"] <= ROUNDING and step[f"{track}/grad_norm"] > 0
