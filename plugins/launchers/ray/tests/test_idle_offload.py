"""`launcher.offload_idle`: of several models that train, those that are idle are off the device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from unirl.core.errors import RecipeError
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.files import plugin_files
from unirl.core.recipe.compose import compose
from unirl.loop.run import train

PLUGIN = '''
import dataclasses, json, os
from pathlib import Path

import torch
from unirl.backends.fsdp2.backend import Fsdp2Backend
from unirl.backends.fsdp2.plugin import SPEC
from unirl.core.errors import RecipeError
from unirl.core.plugins.hookspec import hookimpl

def tensors_of(backend):
    yield from (param.data for param in backend._module.parameters())
    yield from (param.grad for param in backend._module.parameters() if param.grad is not None)
    yield from (value for name, value in backend._optimizer.moments().items() if not name.endswith("/step"))
    for copy in backend._policies.copies.values():
        yield from copy.values.values()

class Away(Fsdp2Backend):
    """On a device of one: what is offloaded is NaN until it is onloaded, and two at once are an error."""

    here = []
    kept = None

    def __init__(self, *args, model, **context):
        self.model = model.spec.name
        assert not Away.here, f"{self.model} is built beside {Away.here}"
        super().__init__(*args, model=model, **context)
        self.note("build")
        Away.here.append(self.model)

    def note(self, event):
        with Path(FOLDER, f"{os.getpid()}.jsonl").open("a") as file:
            print(json.dumps([event, self.model]), file=file)

    def offload(self):
        super().offload()
        Away.here.remove(self.model)
        self.note("offload")
        self.kept = []
        for tensor in tensors_of(self):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            self.kept.append((local, local.clone()))
            local.fill_(float("nan") if local.is_floating_point() else -1)

    def onload(self):
        assert not Away.here, f"{self.model} comes beside {Away.here}"
        Away.here.append(self.model)
        self.note("onload")
        for local, value in self.kept:
            local.copy_(value)
        super().onload()

    def close(self):
        super().close()
        Away.here.clear()

class Stays(Fsdp2Backend):
    def offload(self):
        raise RecipeError("backend: its weights cannot leave the device. Leave out launcher.offload_idle.")

def build(config, *, model, train, steps, seed):
    return Away(config, model=model, train=train, steps=steps, seed=seed)

def build_stays(config, *, model, train, steps, seed):
    return Stays(config, model=model, train=train, steps=steps, seed=seed)

@hookimpl
def unirl_backends():
    return [
        dataclasses.replace(SPEC, name="away", build=f"{__name__}:build"),
        dataclasses.replace(SPEC, name="stays", build=f"{__name__}:build_stays"),
    ]
'''
JOINT = (
    "run.max_steps=3",
    "run.save_every=2",
    "run.keep=0",
    "run.media_every=0",
    "run.threads=1",
    "data.prompts_per_step=2",
    "data.eval=''",
    "stages.rewrite.samples=2",
    "stages.image.samples=2",
    "sampling.image.num_inference_steps=3",
    "sampling.rewrite.max_new_tokens=8",
    "eval.every=0",
    "~tracker.report",
    # No two images share it, so that every step trains.
    "+reward@reward.light=brightness",
    "reward.light.weight=0.1",
    # Averages go along.
    "backend.painter.ema.kind=constant",
)


LOCAL = ("launcher=local", "launcher.offload_idle=true")
RAY = ("launcher=ray", "launcher.train_ranks=2", "launcher.cpus=0.1", "launcher.reward_cpus=0.1")


def joint_run(folder: Path, *words: str, backend: str = "fsdp2", resume: bool = False) -> list[dict[str, float]]:
    """The numbers of each step of a run of two models that train; `moved` reads what was moved."""
    (plugins := folder / "plugins").mkdir(parents=True, exist_ok=True)
    (folder / "notes").mkdir(exist_ok=True)
    (plugins / f"away_{folder.parent.name}_{folder.name}.py").write_text(
        PLUGIN.replace("FOLDER", repr(str(folder / "notes")))
    )
    catalog = Catalog.discover(files=plugin_files(plugins))
    chosen = [f"backend@backend.{name}={backend}" for name in ("writer", "painter")]
    plan = compose("quickstart-enhancer-joint", [*chosen, *JOINT, *words, f"run.dir={folder / 'run'}"], catalog=catalog)
    train(plan, catalog=catalog, resume=folder / "run" if resume else None)
    lines = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    # Traffic has durations, and the names of processes and files.
    return [
        {key: value for key, value in event["metrics"].items() if not key.startswith(("driver/", "sync/"))}
        for event in lines
        if event["kind"] == "step"
    ]


def moved(folder: Path) -> list[list[list[str]]]:
    """Log of each process in order: what was done with which model."""
    files = sorted((folder / "notes").iterdir())
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


@pytest.mark.slow
def test_of_two_models_that_train_one_is_on_the_device_and_no_number_changes(tmp_path: Path) -> None:
    expected = joint_run(tmp_path / "both")
    assert all(step["rewrite/updates"] and step["image/updates"] for step in expected)
    assert joint_run(tmp_path / "turns", *LOCAL, "run.stop_at=2", backend="away") == expected[:2]
    (moves,) = moved(tmp_path / "turns")
    built = [["build", "qwen3"], ["offload", "qwen3"], ["build", "sd3"], ["offload", "sd3"]]
    assert moves[:4] == built
    # The rewrites of a step, its images; training of the writer, and of the painter; the checkpoint of both.
    to_sd3 = [["offload", "qwen3"], ["onload", "sd3"]]
    to_qwen3 = [["offload", "sd3"], ["onload", "qwen3"]]
    step = [*to_sd3, *to_qwen3, *to_sd3]
    assert moves[4:] == [["onload", "qwen3"], *step, *to_qwen3, *step, *to_qwen3, *to_sd3]
    # From its checkpoint, and back to a run of both.
    assert joint_run(tmp_path / "turns", *LOCAL, backend="away", resume=True) == expected


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("placement", ["trainside", "separate"])
def test_ranks_and_rollout_workers_take_turns_and_no_number_changes(
    placement: str, tmp_path: Path, ray_here: None
) -> None:
    words = (*RAY, f"launcher.placement={placement}", "run.max_steps=2")
    expected = joint_run(tmp_path / "both", *words)
    assert joint_run(tmp_path / "turns", *words, "launcher.offload_idle=true", backend="away") == expected
    processes = moved(tmp_path / "turns")
    assert len(processes) == (2 if placement == "trainside" else 3)
    for moves in processes:
        for event in ("onload", "offload"):
            assert {model for what, model in moves if what == event} == {"qwen3", "sd3"}


def test_one_model_that_trains_is_never_idle() -> None:
    plan = compose("quickstart", list(LOCAL), catalog=Catalog.discover())
    (reason,) = match(plan).reasons
    assert str(reason).startswith("launcher.offload_idle: got true, but 'sd3' is the only model that trains")


def test_a_backend_that_cannot_be_offloaded_ends_the_run_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="its weights cannot leave the device"):
        joint_run(tmp_path / "stays", *LOCAL, backend="stays")
