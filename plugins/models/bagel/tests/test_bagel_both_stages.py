"""A plan and its image, both from one process of vLLM-Omni, against the same run on `trainside`, on a CPU and in fp32."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import small_runs
from bagel_runs import SMALL, run
from external_engines.environments import make
from external_engines.latents import assert_same
from external_engines.texts import ROUNDING
from unirl.core.errors import RunFailed
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.roles import WeightReceipt, WeightUpdate
from unirl.core.specs.plan import Stage
from unirl.core.types.request import Request
from unirl.core.types.track import Track
from unirl.engine_host.external import ExternalEngine
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.engine_host.process import EngineProcess
from unirl.engines.trainside.engine import TrainsideEngine
from unirl.loop.checkpoints import Checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

ENGINE = ("engine@engine.plan=vllm-omni", "engine@engine.image=vllm-omni")
ALONE = ("engine.plan.max_num_seqs=1", "engine.image.max_num_seqs=1")
"""Every image by itself: batches form as requests arrive, and another batch rounds differently."""
SETTINGS = (
    *SMALL,
    "backend.trains=full",
    # Weights of another version are then off by far more than rounding.
    "backend.lr=1e-3",
    "sampling.plan.max_new_tokens=12",
    "run.save_every=1",
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
def whole(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Mapping[str, Any]], Seen]:
    """Metrics of each step of two, and what was seen."""
    make("vllm-omni")
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        seen = watched(patch)
        return run(folder, tiny_folder, *SETTINGS, *ENGINE, *ALONE), seen


def test_both_stages_come_from_one_process_and_one_copy_of_the_weights(
    whole: tuple[list[Mapping[str, Any]], Seen],
) -> None:
    """Two updates a step: versions 0 and 2, each sent once."""
    steps, seen = whole
    assert seen.starts == 1
    assert seen.calls == [(what, version) for version in (0, 2) for what in ("weights", "plan", "image")]
    assert len(steps) == 2
    for step in steps:
        for track in ("plan", "image"):
            assert step[f"{track}/logp_mismatch_max"] <= ROUNDING
            assert step[f"{track}/ratio_max_dev_first"] == 0 < step[f"{track}/grad_norm"]


def test_the_first_rollout_is_that_of_trainside(
    whole: tuple[list[Mapping[str, Any]], Seen],
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
    run(tmp_path, tiny_folder, *SETTINGS, "run.max_steps=1")
    (text, image), (own_text, own_image) = tracks, whole[1].tracks[:2]
    assert [row.tolist() for row in own_text.text.tokens] == [row.tolist() for row in text.text.tokens]
    assert own_text.status == text.status and own_text.media == text.media
    assert_same(own_image, image)


def test_an_engine_killed_while_it_writes_ends_the_run_which_resumes_as_if_nothing_happened(
    whole: tuple[list[Mapping[str, Any]], Seen], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the text stage of the second rollout. The resumed run starts one engine and sends the weights once."""
    monkeypatch.chdir(tmp_path)
    generate = ExternalLatentEngine.generate
    words = (*SETTINGS, *ENGINE, *ALONE)

    def struck(engine: ExternalLatentEngine, request: Request) -> Track:
        if (request.track, request.rollout) == ("plan", 1):
            os.kill(engine._process.pid, signal.SIGKILL)
        return generate(engine, request)

    with monkeypatch.context() as patched:
        patched.setattr(ExternalLatentEngine, "generate", struck)
        with pytest.raises(RunFailed, match=r"engine 'vllm-omni'.*(died|ended|is not running)"):
            run(tmp_path, tiny_folder, *words)
    folder = tmp_path / "out"
    assert Checkpoints(folder / "checkpoints").load().step == 1
    with monkeypatch.context() as patched:
        seen = watched(patched)
        run(tmp_path, tiny_folder, *words, resume=folder)
    assert seen.starts == 1 and seen.calls == [("weights", 2), ("plan", 2), ("image", 2)]
    steps = small_runs.steps(folder)
    assert list(steps) == [1, 2]
    assert numbers(steps[2]) == numbers(whole[0][1])


def test_stages_share_an_engine_or_have_their_own_and_texts_need_a_bridge_with_texts(tiny_folder: Path) -> None:
    catalog = Catalog.discover()
    words = [f"model.path={tiny_folder}", "data.train=prompts.txt", *SMALL]
    shared, apart, mixed = (
        compose("bagel/unigrpo", [*words, *engines], catalog=catalog)
        for engines in (ENGINE, [*ENGINE, "engine.plan.max_num_texts=4"], ENGINE[1:])
    )
    for plan, is_shared in ((shared, True), (apart, False), (mixed, False)):
        assert match(plan, catalog=catalog).accepted
        first, second = plan.stages
        assert first.shares_engine(second) is is_shared

    def without_texts(stage: Stage) -> Stage:
        spec = dataclasses.replace(stage.model.spec, bridged_texts=frozenset[str]())
        model = dataclasses.replace(stage.model, spec=spec)
        return dataclasses.replace(stage, learner=dataclasses.replace(stage.learner, model=model))

    assert match(mixed.with_stages(without_texts), catalog=catalog).accepted
    (reason,) = match(shared.with_stages(without_texts), catalog=catalog).reasons
    assert str(reason) == (
        "engine.plan: the bridge of model 'bagel' to engine 'vllm-omni' serves its latent tracks, not its text tracks. "
        "Choose another engine for them, such as trainside."
    )
