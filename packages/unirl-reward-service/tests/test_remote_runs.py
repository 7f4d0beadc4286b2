"""The reward `remote` against two real services: the scores of this process, and runs that outlive a service."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from reward_services import NUMBER, RunningService, running, samples
from unirl.core.errors import CheckpointError, RewardFailed
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.roles import ScoreInput, Scores
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.loop.run import train
from unirl.reward_service.loading import load_reward
from unirl.reward_service.remote.config import RemoteConfig
from unirl.reward_service.remote.reward import build
from unirl.rewards.rules.shapes_world import ALL_SCENES, render

pytestmark = pytest.mark.slow

# A service hashes the code of a reward's package.

SETTINGS = """
scorers:
  light: {{use: brightness}}
  shapes: {{use: shapes}}
  exact: {{use: exact-match}}
  change: {{use: change}}
"""
CHANGE = """
import torch
from unirl.core.plugins.hookspec import hookimpl
from unirl.core.roles import Scores
from unirl.core.specs.part_config import RewardConfig
from unirl.core.specs.spec import RewardSpec
from unirl.numerics.media import load_image

class Change:
    def score(self, samples):
        rows = zip(samples.media.arrays, samples.inputs.media, strict=True)
        changes = [[(image - load_image(ref)).abs().mean() for ref in refs] for image, refs in rows]
        return Scores(
            values=torch.stack([sum(one) / len(one) for one in changes]),
            parts={"first": torch.stack([one[0] for one in changes])},
        )

    def close(self):
        pass

def build(config, *, device):
    return Change()

@hookimpl
def unirl_rewards():
    own = {"build": f"{__name__}:build", "config": "unirl.core.specs.part_config:RewardConfig", "parts": ("first",)}
    return [RewardSpec(name="change", summary="s", scale="0 to 1", range=(0.0, 1.0), media="image", **own)]
"""
"""How far an image is from those that it is made from."""


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog.discover()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "planted_change.py").write_text(CHANGE)
    with running(tmp_path_factory.mktemp("first"), SETTINGS + NUMBER, UNIRL_PLUGINS_DIR=str(folder)) as result:
        yield result


def remote(*services: RunningService, scorer: str, **settings: Any) -> RemoteConfig:
    urls = [service.url for service in services]
    return RemoteConfig(urls=urls, scorer=scorer, **{"deadline_s": 30.0, **settings})


def scores_of(config: RemoteConfig, batch: ScoreInput) -> Scores:
    reward = build(config, device="cpu")
    try:
        return reward.score(batch)
    finally:
        reward.close()


def scenes() -> ScoreInput:
    """Drawings, half of them under another one's caption, in whole 255ths."""
    drawn = ALL_SCENES[:10]
    named = [ALL_SCENES[row if row % 2 else row + 7] for row in range(10)]
    generator = torch.Generator().manual_seed(4)
    pixels = torch.cat([render(scene, count=1, generator=generator) for scene in drawn])
    names = tuple(f"s{row}" for row in range(10))
    return ScoreInput(
        sample_ids=names,
        group_ids=("a", "b") * 5,
        inputs=Inputs.of_texts([scene.caption for scene in named]),
        metadata=tuple({"color": s.color, "shape": s.shape, "place": s.place} for s in named),
        media=Media(kind="image", values=(pixels * 255).round() / 255),
    )


@pytest.mark.parametrize("encoding", ["raw", "png", "webp"])
def test_scores_are_those_of_this_process(service: RunningService, catalog: Catalog, encoding: str) -> None:
    batch = scenes()
    own = load_reward("shapes", {}, device="cpu", catalog=catalog).reward.score(batch)
    parts = ["color", "shape", "place", "perfect"]
    config = remote(service, scorer="shapes", encoding=encoding, batch_size=3, parts=parts)
    scores = scores_of(config, batch)
    assert 0 < float(own.values.mean()) < 1
    # The same pixels to the last bit, and integers divided by three: nothing is rounded differently.
    assert torch.equal(scores.values, own.values)
    assert sorted(scores.parts) == sorted(own.parts)
    assert all(torch.equal(scores.parts[name], own.parts[name]) for name in own.parts)


def test_raw_pixels_keep_every_bit_and_texts_their_order(service: RunningService, catalog: Catalog) -> None:
    pixels = torch.rand(7, 3, 9, 5, generator=torch.Generator().manual_seed(1))
    batch = samples([str(n) for n in range(7)], pixels=pixels)
    own = load_reward("brightness", {}, device="cpu", catalog=catalog)
    # One at a time on both sides, because sums of another batch may be rounded differently.
    expected = torch.cat([own.reward.score(batch.select([row])).values for row in range(7)])
    alone = [scores_of(remote(service, scorer="light"), batch.select([row])).values for row in range(7)]
    assert torch.equal(torch.cat(alone), expected)
    names = tuple(f"s{n}" for n in range(20))
    texts = ScoreInput(
        sample_ids=names,
        group_ids=names,
        inputs=Inputs.of_texts(["?"] * 20),
        metadata=({"answer": "7"},) * 20,
        media=Media(kind="text", values=tuple(str(n) for n in range(20))),
    )
    scores = scores_of(remote(service, scorer="exact", batch_size=3), texts)
    assert scores.values.tolist() == [float(n == 7) for n in range(20)]


@pytest.mark.parametrize("encoding", ["raw", "webp"])
def test_rewards_that_read_source_images_give_the_scores_of_this_process(
    service: RunningService, tmp_path: Path, encoding: str
) -> None:
    """Three edits of one photograph and one of another; equal inputs in one request and in several."""
    for name in "ab":
        Image.effect_noise((9, 7), 90).convert("RGB").save(tmp_path / f"{name}.jpg")
    refs = {name: MediaRef(modality="image", role="source", uri=str(tmp_path / f"{name}.jpg")) for name in "ab"}
    media = [(refs[name],) if name == "a" else (refs["b"], refs["a"]) for name in "aaba"]
    pixels = torch.randint(256, (4, 3, 7, 9), generator=torch.Generator().manual_seed(2)) / 255
    batch = dataclasses.replace(
        samples(["x"] * 4, pixels=pixels),
        inputs=Inputs(ids=tuple("aaba"), prompts=("x",) * 4, texts=("x",) * 4, media=tuple(media)),
    )
    scope: dict[str, Any] = {"__name__": "planted_here"}
    exec(CHANGE, scope)
    own = scope["build"](None, device="cpu").score(batch)
    assert len(set(own.values.tolist())) == 4
    for size in (4, 3):
        config = remote(service, scorer="change", encoding=encoding, batch_size=size, parts=["first"])
        scores = scores_of(config, batch)
        assert torch.equal(scores.values, own.values) and torch.equal(scores.parts["first"], own.parts["first"])


def test_what_the_scorer_refuses_fails_with_its_words(service: RunningService) -> None:
    batch = samples(["1", "2"], pixels=torch.full((2, 3, 4, 4), 2.0))
    with pytest.raises(RewardFailed, match=r"reward_failed: reward\.brightness: sample 's0'.*must lie in"):
        scores_of(remote(service, scorer="light"), batch)
    with pytest.raises(RewardFailed, match="got image, expected text"):
        scores_of(remote(service, scorer="exact"), batch)
    with pytest.raises(RewardFailed, match="not_found: scorer: got 'nobody', expected one of change, exact, light"):
        scores_of(remote(service, scorer="nobody"), batch)
    with pytest.raises(RewardFailed, match="parts: got 'hue', expected some of the scorer's: color"):
        scores_of(remote(service, scorer="shapes", parts=["hue"]), batch)
    with pytest.raises(RewardFailed, match=r"version: scorer 'light' is [0-9a-f]{64}, expected abc"):
        scores_of(remote(service, scorer="light", version="abc"), batch)


def test_a_dead_service_fails_the_run_after_its_deadline_with_one_error() -> None:
    config = RemoteConfig(urls=["http://127.0.0.1:9", "http://127.0.0.1:10"], scorer="light", deadline_s=0.3)
    with pytest.raises(
        RewardFailed, match=r"no replica gave a reply within deadline_s = 0\.3: http://127\.0\.0\.1:9: .*:10:"
    ):
        build(config, device="cpu")


def test_a_reward_has_a_service_of_its_own_with_a_scorer_in_its_own_environment(tmp_path: Path) -> None:
    venv.create(tmp_path / "env")
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (site / "also.pth").write_text("\n".join(entry for entry in sys.path if entry))
    (site / "only_in_this_environment.py").write_text("VALUE = 7.25\n")
    (tmp_path / "mine.py").write_text(
        "import os, only_in_this_environment as own\n"
        "def score(images, prompts): return [own.VALUE if p == 'value' else os.getpid() for p in prompts]\n"
    )
    file = tmp_path / "rewards.yaml"
    file.write_text(
        f"scorers: {{mine: {{use: function, settings: {{target: '{tmp_path}/mine.py:score'}},"
        f" python: {tmp_path}/env/bin/python}}}}"
    )
    with closing(build(RemoteConfig(serve=str(file), scorer="mine"), device="cpu")) as reward:
        value, pid = reward.score(samples(["value", "pid"])).values.tolist()
        assert value == 7.25
        os.kill(int(pid), 0)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
    # Not in this one.
    assert find_spec("only_in_this_environment") is None
    file.write_text("scorers: {}")
    with pytest.raises(
        RewardFailed, match=r"the service of .*rewards\.yaml ended with exit code 2: .*scorers: got none"
    ):
        build(RemoteConfig(serve=str(file), scorer="mine"), device="cpu")


SMALL = [
    "~reward.shapes",
    "data.prompts_per_step=2",
    "data.samples_per_prompt=4",
    "data.eval=null",
    "sampling.num_inference_steps=2",
    "train.updates_per_step=1",
    "run.media_every=0",
    "run.threads=1",
    "run.max_steps=4",
    "~tracker.report",
]
FAR = ["+reward@reward.far=remote", "reward.far.scorer=number", "reward.far.deadline_s=30", "reward.far.batch_size=2"]


class Held:
    """A service whose scorer waits in each call of `number`."""

    def __init__(self, service: RunningService) -> None:
        self._files = [service._log.with_name(f"scored.txt.{end}") for end in ("hold", "held")]
        self._files[0].touch()

    def wait(self) -> None:
        """Until a call waits."""
        until = time.monotonic() + 120
        while not self._files[1].exists():
            assert time.monotonic() < until, "no request came"
            time.sleep(0.01)

    def release(self) -> None:
        for file in self._files:
            file.unlink()


def steps_of(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "events.jsonl").read_text().splitlines() if folder.exists() else []
    return [event["metrics"] for event in map(json.loads, lines) if event["kind"] == "step"]


def scored_images(*folders: Path) -> list[str]:
    """Image and score of each sample that a reward `number` scored to the end."""
    return sorted(line for folder in folders for line in (folder / "scored.txt.done").read_text().splitlines())


def test_a_run_outlives_a_scorer_and_a_service_killed_within_its_steps(
    service: RunningService, catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is killed while it scores, in the first and the second step; then the run is resumed, and continues with
    the same version only. Images, scores and losses are those of a run that scores in its own process."""
    here, there = tmp_path / "here", tmp_path / "there"

    def run(*words: str, resume: Path | None = None) -> None:
        overrides = [*SMALL, *words]
        train(compose("quickstart", overrides, catalog=catalog), catalog=catalog, resume=resume, overrides=overrides)

    monkeypatch.setenv("SCORED", str(tmp_path / "scored.txt"))
    target = f"reward.far.target={service._log.with_name('number.py')}:number"
    run("+reward@reward.far=function", target, "run.stop_at=3", f"run.dir={here}")

    with running(tmp_path / "other", "scorers:" + NUMBER) as other:

        def kill() -> None:
            first.wait()
            os.kill(other.pid_of("number"), signal.SIGKILL)
            first.release()
            while len(steps_of(there)) < 1:
                time.sleep(0.01)
            Held(other).wait()
            os.kill(other.process.pid, signal.SIGKILL)

        service._log.with_name("scored.txt.done").unlink(missing_ok=True)
        words = (*FAR, f"reward.far.urls=[{service.url},{other.url}]")
        first = Held(other)
        with ThreadPoolExecutor(1) as thread:
            killed = thread.submit(kill)
            run(*words, "run.stop_at=2", f"run.dir={there}")
            killed.result()
        assert other.process.wait(timeout=20) == -signal.SIGKILL
    run(*words, "run.stop_at=3", resume=there)

    assert scored_images(service._log.parent, tmp_path / "other") == scored_images(tmp_path)
    assert len(set(scored_images(tmp_path))) == 3 * 8
    expected, result = steps_of(here), steps_of(there)
    for key in ("reward/far", "reward_mean", "reward_std", "loss", "grad_norm"):
        assert [step[key] for step in result] == [step[key] for step in expected], key

    # Other code under the same name, which a scorer has from its next start on.
    reward = build(remote(service, scorer="number"), device="cpu")
    with closing(reward):
        with service._log.with_name("number.py").open("a") as code:
            code.write("# changed\n")
        os.kill(service.pid_of("number"), signal.SIGKILL)
        with pytest.raises(RewardFailed, match=r"version_mismatch: version: scorer 'number' is [0-9a-f]{64}, expected"):
            reward.score(samples(["1", "2"]))
    with pytest.raises(CheckpointError, match=r"reward\.far\.scorer: number has changed since this run began"):
        run(*words, resume=there)
