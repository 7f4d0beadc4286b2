"""Small runs of the quickstarts, and what they leave behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.specs.plan import Plan
from unirl.loop.run import RunResult, train

SMALL = (
    "data.prompts_per_step=4",
    "data.samples_per_prompt=4",
    "sampling.num_inference_steps=4",
    "data.eval=''",
    "eval.every=0",
    "eval.num_prompts=2",
    "eval.samples_per_prompt=4",
    "run.media_every=0",
    "run.threads=1",
    "run.keep=0",
    "~tracker.report",
    # A second reward that no two images share: the shapes of a dozen images may all score the same.
    "+reward@reward.light=brightness",
    "reward.light.weight=0.1",
)
EVALUATED = ("data.eval=${asset:quickstart,prompts/heldout.jsonl}",)
"""In addition to SMALL: held-out prompts are scored before the first step and after the last one."""
SMALL_TEXT = (
    "data.prompts_per_step=4",
    "data.samples_per_prompt=4",
    "data.eval=''",
    "sampling.max_new_tokens=12",
    "eval.every=0",
    "run.keep=0",
    "~tracker.report",
)
SMALL_DRAFT = (*(word for word in SMALL if "reward" not in word), "data.samples_per_prompt=1")


@cache
def catalog() -> Catalog:
    return Catalog.discover()


def plan(*words: str, recipe: str = "quickstart", small: Sequence[str] = SMALL) -> Plan:
    """small: what makes a run of the recipe short."""
    return compose(recipe, [*small, *words], catalog=catalog())


def run(
    folder: Path,
    *words: str,
    resume: Path | None = None,
    recipe: str = "quickstart",
    small: Sequence[str] = SMALL,
) -> RunResult:
    """Train in this process. Continues the run in `resume`, or starts one in `folder`."""
    words = words if resume else (f"run.dir={folder}", *words)
    return train(plan(*words, recipe=recipe, small=small), catalog=catalog(), resume=resume, overrides=words)


def rows_of_denoiser(monkeypatch: pytest.MonkeyPatch) -> dict[bool, int]:
    """Rows that go through the denoiser of SD3 from now on, by whether they have a gradient."""
    from unirl.models.sd3.model import Sd3Model

    rows, velocity = {True: 0, False: 0}, Sd3Model.velocity

    def counted(self: Sd3Model, x: Tensor, *given: Any, **more: Any) -> Tensor:
        rows[torch.is_grad_enabled()] += len(x)
        return velocity(self, x, *given, **more)

    monkeypatch.setattr(Sd3Model, "velocity", counted)
    return rows


def start_command(*words: str, cwd: Path, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """`unirl` as a separate process, the leader of a process group.

    environment: variables besides those of this process.
    """
    return subprocess.Popen(
        [Path(sys.executable).with_name("unirl"), *words],
        cwd=cwd,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def steps(folder: Path) -> dict[int, dict[str, float]]:
    """Step -> its numbers; of a step that was done twice, those of the last time."""
    return {event["step"]: event["metrics"] for event in events(folder, "step")}


def tensors(folder: Path, step: int) -> dict[str, Any]:
    """Everything that a checkpoint holds, whole, by name; what a critic has begins with `critic`."""
    result = dict[str, Any]()
    for path in sorted((folder / "checkpoints" / f"step-{step:06d}").rglob(".metadata")):
        part = "critic" if path.parent.name == "critic" else ""
        file = folder / f"whole-{step}{part}.pt"
        dcp_to_torch_save(path.parent, file)
        result |= flat(torch.load(file, weights_only=True), part)
    assert result, f"step {step} left no checkpoint"
    return result


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    return {name: item for key, inner in value.items() for name, item in flat(inner, f"{prefix}/{key}").items()}


def copy_up_to(folder: Path, step: int, into: Path) -> Path:
    """The run as it was when this step had been saved."""
    shutil.copytree(folder, into)
    for path in (into / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    kept = [line for line in (into / "events.jsonl").read_text().splitlines() if json.loads(line)["step"] <= step]
    (into / "events.jsonl").write_text("".join(f"{line}\n" for line in kept))
    return into
