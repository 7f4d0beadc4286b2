"""Samples that a run leaves in its folder: which steps, what of them, and that a failure does not take them away."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_toy import Light, ToyAlgorithm, ToyBackend, at, parts, plan, run
from unirl.core.errors import RewardFailed, RunFailed, RunFolderError
from unirl.core.roles import ScoreInput, Scores
from unirl.core.types.track import Track
from unirl.loop.saved_samples import read_samples, remove_samples, saved_steps


def shown(folder: Path, **settings: Any) -> Any:
    """A plan that shows the samples of every step."""
    return plan(run={"dir": str(folder), "media_every": 1, "max_steps": 2, **settings})


class HalfAlgorithm(ToyAlgorithm):
    """Trains on the samples above the mean alone."""

    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        track, numbers = super().advantages(track)
        assert track.advantages is not None
        return track.select([row for row in range(track.num_rows) if float(track.advantages[row]) > 0]), numbers


class Constant(Light):
    def score(self, samples: ScoreInput) -> Scores:
        return dataclasses.replace(super().score(samples), values=torch.full((samples.num_rows,), 0.25))


def test_the_samples_of_a_step_are_saved_with_their_scores_and_advantages(tmp_path: Path) -> None:
    backend = ToyBackend()
    run(parts(backend=backend), shown(tmp_path))
    assert saved_steps(tmp_path) == [0, 1]
    for step, trained in enumerate(backend.trained):
        (saved,) = read_samples(tmp_path, step).values()
        track = saved.track
        assert saved.left_out is None and track.sample_ids == trained.sample_ids
        assert track.rewards is not None and trained.rewards is not None and track.advantages is not None
        assert torch.equal(track.rewards, trained.rewards)
        assert torch.equal(track.advantages, trained.rewards - trained.rewards.mean())
        assert torch.equal(track.reward_parts["light/group"], trained.reward_parts["light/group"])
        assert torch.equal(track.latent.sigmas, trained.latent.sigmas)
        assert track.latent.initial_noise == trained.latent.initial_noise
        # What is large is left out: latents have no elements, images are the trackers' matter.
        assert track.latent.latents.shape == (8, 2, 0) and track.media is None and not track.conditions


@pytest.mark.parametrize(("every", "saved"), [(0, []), (1, [0, 1, 2, 3, 4]), (2, [0, 2, 4])])
def test_every_so_many_steps(tmp_path: Path, every: int, saved: list[int]) -> None:
    run(parts(), shown(tmp_path, media_every=every, max_steps=5))
    assert saved_steps(tmp_path) == saved


def test_samples_that_the_algorithm_leaves_out_are_saved_beside_the_others(tmp_path: Path) -> None:
    run(parts(algorithm=HalfAlgorithm()), shown(tmp_path, max_steps=1))
    (saved,) = read_samples(tmp_path, 0).values()
    left = saved.left_out
    assert left is not None and left.rewards is not None and saved.track.rewards is not None
    assert saved.track.num_rows + left.num_rows == 8 and not {*saved.track.sample_ids} & {*left.sample_ids}
    assert left.advantages is None and float(left.rewards.max()) < float(saved.track.rewards.min())


def test_a_step_that_fails_leaves_its_samples(tmp_path: Path) -> None:
    """One that has nothing to learn from says "look at the samples"; so they are there."""
    constant = shown(tmp_path / "constant")
    constant.only.advantage.constant_reward = "fail"
    with pytest.raises(RewardFailed, match=r"all 8 samples of step 0 got 0\.25"):
        run(parts(rewards={"light": Constant()}), constant)
    (saved,) = read_samples(tmp_path / "constant", 0).values()
    assert saved.track.rewards is not None and saved.track.rewards.tolist() == [0.25] * 8
    assert saved.track.advantages is None

    def fail() -> None:
        raise RuntimeError("no memory")

    with pytest.raises(RunFailed, match="no memory"):
        run(parts(backend=ToyBackend(during=at(1, fail))), shown(tmp_path / "train"))
    assert saved_steps(tmp_path / "train") == [0, 1]
    assert read_samples(tmp_path / "train", 1)["image"].track.advantages is not None


def test_a_resumed_run_removes_the_samples_that_it_makes_again(tmp_path: Path) -> None:
    run(parts(), shown(tmp_path, max_steps=4))
    remove_samples(tmp_path, start=2)
    assert saved_steps(tmp_path) == [0, 1]
    remove_samples(tmp_path / "none", start=0)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    run(parts(), shown(tmp_path, max_steps=1))
    file = tmp_path / "samples" / "step-000000" / "image.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(RunFolderError, match=rf"{file}: these samples cannot be read: .*cut off"):
        read_samples(tmp_path, 0)
    # The format number of a later version.
    assert content.count(b'{\\"format\\":1,') == 1
    file.write_bytes(content.replace(b'{\\"format\\":1,', b'{\\"format\\":7,'))
    with pytest.raises(RunFolderError, match=r"format 7 was found; this version of unirl-core reads format 1"):
        read_samples(tmp_path, 0)
