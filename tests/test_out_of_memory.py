"""Memory that runs out in a step: one error with the phase, the amount and the settings, and a run that resumes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray_clusters
import torch
from small_runs import SMALL, events, plan, run, tensors
from unirl.core.errors import RewardFailed, RunFailed
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.files import plugin_files
from unirl.core.recipe.compose import compose
from unirl.core.specs.leaves import leaves
from unirl.loop.parts import attributed
from unirl.loop.run import train
from unirl.quickstart import checkpoint_path
from unirl.tools.plan.out_of_memory import explanation

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).parent / "support" / "short_memory.py"
WORDS = (
    "run.max_steps=2",
    "run.save_every=1",
    "data.eval=''",
    "train.updates_per_step=1",
    "train.micro_batch_size=0",
)
CASES = {
    # A batch of 16 samples of 256 tokens: tensors of 2 MiB, of which a layer has a dozen.
    "generate": (
        2 * 2**20,
        (),
        ("engine.forward_batch (0, all)", "model.decode_batch (32)"),
        ("engine.forward_batch=1", "model.decode_batch=1"),
    ),
    # Sampled one by one; 256 forwards in one pass then keep some 70 MiB of activations. Rewards take tensors of 3 MiB;
    # with 24 to spare, they ran out first on one machine.
    "train": (
        44 * 2**20,
        ("data.samples_per_prompt=16", "engine.forward_batch=1", "model.decode_batch=1"),
        ("train.micro_batch_size (0, all samples)", "train.replay=serial", "backend.activation_checkpointing=true"),
        ("train.micro_batch_size=1", "train.replay=serial", "backend.activation_checkpointing=true"),
    ),
}
"""Phase -> bytes to spare above what the process has after a step, words, settings that the error names, and the words
that the run is resumed with."""


@pytest.mark.parametrize("phase", CASES)
def test_a_step_without_memory_fails_with_what_to_do_and_the_run_resumes(phase: str, tmp_path: Path) -> None:
    spare, words, settings, changes = CASES[phase]
    folder = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(spare), f"run.dir={folder}", *WORDS, *words],
        capture_output=True,
        text=True,
        timeout=600,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MALLOC_MMAP_THRESHOLD_": str(2**17),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
    )
    assert done.returncode == 1, done.stderr[-3000:]
    error = next(line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert f"failed in phase '{phase}': " in error, error
    assert f"Out of memory in phase '{phase}': " in done.stderr
    assert "Settings that lower it: " in done.stderr and all(word in done.stderr for word in settings)
    assert f"resume with `unirl train --resume {folder}`" in done.stderr
    (end,) = events(folder, "run_finished")
    assert end["status"] == "failed" and f"Out of memory in phase '{phase}'" in end["error"]
    saved = tensors(folder, 1)

    result = run(folder, *WORDS, *words, *changes, resume=folder)
    assert (result.status, result.step) == ("done", 2)
    again = tensors(folder, 1)
    assert all(torch.equal(again[name], value) for name, value in saved.items() if isinstance(value, torch.Tensor))


PLUGIN = """
import dataclasses

import torch
from unirl.core.plugins.hookspec import hookimpl
from unirl.models.sd3.plugin import SPEC

def build(config, **context):
    from unirl.models.sd3.model import build

    model = build(config, **context)
    # 4 PiB: more than processes can address, whatever the machine has.
    model.velocity = lambda *args, **named: torch.empty(2**50)
    return model

@hookimpl
def unirl_models():
    return [dataclasses.replace(SPEC, name="boundless", build=f"{__name__}:build")]
"""
"""sd3 with a forward pass that takes more memory than there is."""


REWARD = """
import torch

def score(images, prompts):
    # 4 PiB: more than processes can address, whatever the machine has.
    return torch.empty(2**50)
"""


def test_a_reward_without_memory_is_named_with_its_own_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("huge.py").write_text(REWARD)
    words = ["run.dir=run", "data.eval=''", "run.max_steps=1", "+reward@reward.huge=function"]
    with pytest.raises(RewardFailed, match=r"^reward\.huge: score .*raised RuntimeError") as failed:
        run(Path("run"), *words, "reward.huge.target=huge.py:score")
    notes = "\n".join(failed.value.__notes__)
    assert "Out of memory in phase 'score': tried to allocate 4096.0 TiB." in notes
    assert "Settings that lower it: processes of their own by launcher=ray. A resumed run may change them." in notes
    assert "engine.forward_batch" not in notes and "micro_batch" not in notes


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    """A cluster on this machine, which launchers find running and leave as it is."""
    with ray_clusters.joined():
        yield


@pytest.mark.usefixtures("ray_here")
def test_a_worker_of_ray_without_memory_is_reported_as_a_process_of_its_own_is(tmp_path: Path) -> None:
    (plugins := tmp_path / "plugins").mkdir()
    (plugins / "boundless.py").write_text(PLUGIN)
    found = Catalog.discover(files=plugin_files(plugins))
    words = [*SMALL, f"run.dir={tmp_path / 'run'}", "data.eval=''", "launcher=ray"]
    words += ["model=boundless", f"model.path={checkpoint_path()}", "run.max_steps=1"]
    with pytest.raises(RunFailed, match=r"^launcher: worker .* in phase 'generate' failed: RuntimeError: ") as failed:
        train(compose("quickstart", words, catalog=found), catalog=found, overrides=words)
    notes = "\n".join(failed.value.__notes__)
    assert "Out of memory in phase 'generate': tried to allocate 4096.0 TiB." in notes
    assert "Settings that lower it: engine.forward_batch (0, all), " in notes


def test_amounts_and_causes_of_every_allocator_are_understood_and_other_failures_are_left_alone() -> None:
    small = plan()
    # torch's text on CUDA, c10/cuda/CUDACachingAllocator.cpp.
    said = "CUDA out of memory. Tried to allocate 20.50 MiB. GPU 0 has a total capacity of 79.11 GiB of which ..."
    cuda = RunFailed(f"backend 'fsdp2' failed in phase 'train': OutOfMemoryError: {said}", phase="train")
    text = explanation(small, cuda)
    assert text.startswith("Out of memory in phase 'train': tried to allocate 20.5 MiB.\nPredicted for each train ")
    again, new = text.splitlines()[-2:]
    assert again.endswith(" A resumed run may change them.") and new.startswith("Settings that lower it in a new run: ")
    changing = small.numeric_leaves()
    for line, count in ((again, False), (new, True)):
        named = re.findall(r"\b[a-z]+\.[a-z_]+", line)
        assert named and all(key in leaves(small.resolved) and (key in changing) is count for key in named), named
    python = RunFailed("engine 'x' failed in phase 'generate': MemoryError: ", phase="generate")
    assert explanation(small, python).startswith("Out of memory in phase 'generate'.\n")
    other = RunFailed("engine 'x' failed in phase 'generate': RuntimeError: shapes differ", phase="generate")
    assert explanation(small, other) == ""


PICK = ("+reward@reward.pick=aesthetic", "reward.pick.path=somewhere/nothing")


@pytest.mark.parametrize(
    ("error", "phase", "words", "same", "new"),
    [
        (
            RewardFailed("reward.pick: raised OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB."),
            "score",
            PICK,
            "reward.pick.batch_size (16), processes of their own by launcher=ray",
            "reward.pick.dtype=bfloat16, data.prompts_per_step (4)",
        ),
        (
            RunFailed(
                "launcher: worker reward-0 in phase 'score pick' failed: OutOfMemoryError: CUDA out of memory.",
                phase="score pick",
            ),
            "score",
            (*PICK, "launcher=ray"),
            "reward.pick.batch_size (16), devices of their own by launcher.reward_gpus (-1)",
            "reward.pick.dtype=bfloat16, data.prompts_per_step (4)",
        ),
        (
            RunFailed("engine 'vllm' failed in phase 'sync': RuntimeError: CUDA out of memory.", phase="sync"),
            "sync",
            ("launcher=ray", "launcher.placement=separate"),
            "launcher.bucket_mb (256)",
            "backend.trains=lora",
        ),
    ],
    ids=["score", "score of a worker", "sync"],
)
def test_each_phase_names_what_lowers_its_memory(
    error: Exception, phase: str, words: tuple[str, ...], same: str, new: str
) -> None:
    lines = explanation(plan(*words), error).splitlines()
    assert lines[0].startswith(f"Out of memory in phase {phase!r}")
    again = next(line for line in lines if line.endswith(" A resumed run may change them."))
    assert again.startswith(f"Settings that lower it: {same}. "), again
    assert lines[-1].startswith(f"Settings that lower it in a new run: {new}"), lines[-1]


def test_a_failure_without_a_phase_gets_that_in_which_it_came() -> None:
    with pytest.raises(RunFailed) as failed, attributed("engine 'vllm'", phase="sync"):
        raise RunFailed("engine 'vllm': the server raised OutOfMemoryError")
    assert failed.value.phase == "sync"
