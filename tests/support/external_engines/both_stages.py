"""Tests for every latent engine that generates both stages of a model, a text and its image, in one process: a model's
test module imports all of them, against the same run on `trainside`, on a CPU and in fp32.

The module has the fixtures `tiny_folder` and `recipe`, which says how to run a recipe of two stages.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import small_runs
from unified_models import Steps
from unirl.core.errors import RunFailed
from unirl.core.roles import WeightReceipt, WeightUpdate
from unirl.core.types.request import Request
from unirl.core.types.track import Track
from unirl.engine_host.external import ExternalEngine
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.engine_host.process import EngineProcess
from unirl.engines.trainside.engine import TrainsideEngine
from unirl.loop.checkpoints import Checkpoints

from .environments import make
from .latents import assert_same
from .texts import ROUNDING

__all__ = [
    "test_an_engine_killed_while_it_writes_ends_the_run_which_resumes_as_if_nothing_happened",
    "test_both_stages_come_from_one_process_and_one_copy_of_the_weights",
    "test_the_first_rollout_is_that_of_trainside",
    "whole",
]


@dataclass(frozen=True)
class BothStages:
    """A recipe of the stages `text` and `image`, with short words for a run on a miniature."""

    text: str
    """Name of the stage of texts."""
    words: tuple[str, ...]
    """Overrides of both engines."""
    run: Callable[..., Steps]
    """Takes the folder of the run, the checkpoint, overrides and `resume`; see `unified_models.run`."""
    engine: str = "vllm-omni"

    @property
    def settings(self) -> tuple[str, ...]:
        return (
            *self.words,
            "backend.trains=full",
            # Weights of another version are then off by far more than rounding.
            "backend.lr=1e-3",
            f"sampling.{self.text}.max_new_tokens=12",
            "run.save_every=1",
        )

    @property
    def hosted(self) -> tuple[str, ...]:
        """Both stages on the engine. Every image by itself: batches form as requests arrive, and another batch rounds
        differently."""
        stages = (self.text, "image")
        return tuple(
            word
            for stage in stages
            for word in (f"engine@engine.{stage}={self.engine}", f"engine.{stage}.max_num_seqs=1")
        )


@dataclass
class Seen:
    """What a run did to its engines."""

    starts: int = 0
    calls: list[tuple[str, int]] = field(default_factory=list)
    """Versions that were loaded, and those of what was generated, in order."""
    tracks: list[Track] = field(default_factory=list)


def watched(patch: pytest.MonkeyPatch) -> Seen:
    seen = Seen()
    start, load, generate = EngineProcess.start, ExternalEngine.load_weights, ExternalLatentEngine.generate

    def started(process: EngineProcess) -> None:
        seen.starts += 1
        start(process)

    def loaded(engine: ExternalEngine, update: WeightUpdate) -> WeightReceipt:
        receipt = load(engine, update)
        seen.calls.append(("weights", receipt.version))
        return receipt

    def generated(engine: ExternalLatentEngine, request: Request) -> Track:
        track = generate(engine, request)
        (version,) = set(track.policy_version)
        seen.calls.append((request.track, version))
        seen.tracks.append(track)
        return track

    patch.setattr(EngineProcess, "start", started)
    patch.setattr(ExternalEngine, "load_weights", loaded)
    patch.setattr(ExternalLatentEngine, "generate", generated)
    return seen


def numbers(step: Mapping[str, Any]) -> dict[str, float]:
    """Metrics without times."""
    return {name: value for name, value in step.items() if not name.startswith("perf/")}


@pytest.fixture(scope="module")
def whole(tiny_folder: Path, recipe: BothStages, tmp_path_factory: pytest.TempPathFactory) -> tuple[Steps, Seen]:
    """Metrics of each step of two, and what was seen."""
    make(recipe.engine)
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        seen = watched(patch)
        return recipe.run(folder, tiny_folder, *recipe.settings, *recipe.hosted), seen


def test_both_stages_come_from_one_process_and_one_copy_of_the_weights(
    whole: tuple[Steps, Seen], recipe: BothStages
) -> None:
    """Two updates a step: versions 0 and 2, each sent once."""
    steps, seen = whole
    assert seen.starts == 1
    assert seen.calls == [(what, version) for version in (0, 2) for what in ("weights", recipe.text, "image")]
    assert len(steps) == 2
    for step in steps:
        for track in (recipe.text, "image"):
            assert step[f"{track}/logp_mismatch_max"] <= ROUNDING
            assert step[f"{track}/ratio_max_dev_first"] == 0 < step[f"{track}/grad_norm"]


def test_the_first_rollout_is_that_of_trainside(
    whole: tuple[Steps, Seen],
    recipe: BothStages,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same seeds and noise give the same texts, and the images that continue from them."""
    monkeypatch.chdir(tmp_path)
    tracks: list[Track] = []
    generate = TrainsideEngine.generate

    def noted(engine: TrainsideEngine, request: Request) -> Track:
        tracks.append(generate(engine, request))
        return tracks[-1]

    monkeypatch.setattr(TrainsideEngine, "generate", noted)
    recipe.run(tmp_path, tiny_folder, *recipe.settings, "run.max_steps=1")
    (text, image), (own_text, own_image) = tracks, whole[1].tracks[:2]
    assert [row.tolist() for row in own_text.text.tokens] == [row.tolist() for row in text.text.tokens]
    assert own_text.status == text.status and own_text.media == text.media
    assert_same(own_image, image)


def test_an_engine_killed_while_it_writes_ends_the_run_which_resumes_as_if_nothing_happened(
    whole: tuple[Steps, Seen],
    recipe: BothStages,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed in the text stage of the second rollout. The resumed run starts one engine and sends the weights once."""
    monkeypatch.chdir(tmp_path)
    generate = ExternalLatentEngine.generate
    words = (*recipe.settings, *recipe.hosted)

    def struck(engine: ExternalLatentEngine, request: Request) -> Track:
        if (request.track, request.rollout) == (recipe.text, 1):
            os.kill(engine._process.pid, signal.SIGKILL)
        return generate(engine, request)

    with monkeypatch.context() as patched:
        patched.setattr(ExternalLatentEngine, "generate", struck)
        with pytest.raises(RunFailed, match=rf"engine '{recipe.engine}'.*(died|ended|is not running)"):
            recipe.run(tmp_path, tiny_folder, *words)
    folder = tmp_path / "out"
    assert Checkpoints(folder / "checkpoints").load().step == 1
    with monkeypatch.context() as patched:
        seen = watched(patched)
        recipe.run(tmp_path, tiny_folder, *words, resume=folder)
    assert seen.starts == 1 and seen.calls == [("weights", 2), (recipe.text, 2), ("image", 2)]
    steps = small_runs.steps(folder)
    assert list(steps) == [1, 2]
    assert numbers(steps[2]) == numbers(whole[0][1])
