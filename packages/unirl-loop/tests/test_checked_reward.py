"""A reward that misbehaves is refused by name, with what it did and what was expected."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from unirl.core.errors import PluginBroken, RewardFailed, RunFailed
from unirl.core.roles import ScoreInput, Scores
from unirl.core.specs.part_config import RewardConfig
from unirl.core.specs.plan import Choice
from unirl.core.specs.spec import EngineSpec, ModelSpec, RewardSpec, Spec, TrackerSpec
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.loop.checked_reward import CheckedReward
from unirl.loop.parts import errors_under

SPEC = RewardSpec(
    name="taste",
    summary="s",
    build="taste:build",
    config="taste:Config",
    scale="0 to 1",
    range=(0.0, 1.0),
    media="image",
    parts=("colour",),
)
GOOD = Scores(values=torch.tensor([0.0, 1.0]), parts={"colour": torch.tensor([1.0, 0.0])})


class Reward:
    def __init__(self, score: Callable[[ScoreInput], Any], close: Callable[[], Any] = lambda: None) -> None:
        self._score, self._close = score, close

    def score(self, samples: ScoreInput) -> Any:
        return self._score(samples)

    def close(self) -> None:
        self._close()


def samples(media: Media | None = None) -> ScoreInput:
    return ScoreInput(
        sample_ids=("a", "b"),
        group_ids=("g", "g"),
        inputs=Inputs.of_texts(["x", "y"]),
        metadata=({}, {}),
        media=media or pictures(),
    )


def pictures(values: torch.Tensor | None = None) -> Media:
    return Media(kind="image", values=torch.zeros(2, 3, 4, 4) if values is None else values)


def scored(score: Callable[[ScoreInput], Any], media: Media | None = None, *, spec: RewardSpec = SPEC) -> Scores:
    return CheckedReward("reward.mine", Reward(score), spec=spec).score(samples(media))


def test_a_reward_that_keeps_its_word_passes_unchanged() -> None:
    assert scored(lambda _: GOOD) is GOOD


@pytest.mark.parametrize(
    ("raised", "shown"),
    [
        ("reward.taste: has no tongue", "reward.mine: has no tongue"),
        ("reward.taste.salt: got 2", "reward.mine.salt: got 2"),
        ("reward.tastes: got 2", "reward.tastes: got 2"),
        ("no key: reward.taste", "no key: reward.taste"),
        ("no salt: set reward.taste.salt=1", "no salt: set reward.mine.salt=1"),
        ("a/reward.taste.yaml: no such file", "a/reward.taste.yaml: no such file"),
    ],
)
def test_an_error_under_the_name_of_a_reward_is_raised_under_its_key(raised: str, shown: str) -> None:
    def fail(_: ScoreInput) -> Scores:
        raise RewardFailed(raised)

    with pytest.raises(RewardFailed) as caught:
        scored(fail)
    assert str(caught.value) == shown


@pytest.mark.parametrize(
    ("spec", "key", "raised", "shown"),
    [
        (TrackerSpec, "tracker.w", "tracker.toy.mode: got 'of'", "tracker.w.mode: got 'of'"),
        (ModelSpec, "stages.image.model", "model.path: no folder", "stages.image.model.path: no folder"),
        (ModelSpec, "teachers.big", "model: model.embed has NaN", "teachers.big: model.embed has NaN"),
        (EngineSpec, "stages.text.engine", "engine: no GPU", "stages.text.engine: no GPU"),
        (EngineSpec, "stages.text.engine", "engine 'toy' died", "engine 'toy' died"),
    ],
)
def test_an_error_of_a_part_that_is_built_is_raised_under_its_key(
    spec: type[Spec], key: str, raised: str, shown: str
) -> None:
    toy = spec.__new__(spec)
    object.__setattr__(toy, "name", "toy")
    with pytest.raises(RunFailed) as caught, errors_under(key, spec=toy):
        raise RunFailed(raised, phase="build")
    assert (str(caught.value), caught.value.phase) == (shown, "build")


def test_settings_that_break_their_own_part_are_its_failure() -> None:
    config = RewardConfig()
    config.named_code = lambda: {}[".target"]
    choice = Choice(key="reward.mine", spec=SPEC, config=config, dist="acme", version="2")
    with (
        pytest.raises(
            PluginBroken, match=r"^reward\.mine: reward 'taste' of acme 2 failed on its own settings: KeyError"
        ),
        choice.attributed(),
    ):
        choice.config.named_code()


def test_rounding_at_the_ends_of_the_range_is_no_failure() -> None:
    values = torch.tensor([-5e-7, 1 + 5e-7])
    assert scored(lambda _: Scores(values=values, parts=GOOD.parts)).values is values


def test_values_of_samples_without_a_score_may_be_anything() -> None:
    for value in (7.0, float("nan")):
        reply = Scores(values=torch.tensor([0.5, value]), parts=GOOD.parts, scored=torch.tensor([True, False]))
        assert scored(lambda _, reply=reply: reply) is reply


REPLIES = {
    "none": (None, r"score\(\) returned None; expected unirl.core.roles.Scores"),
    "list": ([0.0, 1.0], r"score\(\) returned list \[0.0, 1.0\]; expected unirl.core.roles.Scores"),
    "tensor": (GOOD.values, r"score\(\) returned Tensor tensor\(\[0., 1.\]\); expected unirl.core.roles.Scores"),
    "list in Scores": (Scores(values=[0.0, 1.0], parts=GOOD.parts), r"values of Scores is list .*expected a tensor"),
    "list in a part": (
        Scores(values=GOOD.values, parts={"colour": [1, 0]}),
        r"parts\['colour'\] of Scores is list \[1, 0\]; expected a tensor of shape \(2,\), one number per sample",
    ),
    "wrong number": (
        Scores(values=torch.tensor([0.0, 1.0, 1.0]), parts=GOOD.parts),
        r"values of Scores is a tensor of shape \(3,\); expected a tensor of shape \(2,\), one number per sample",
    ),
    "not finite": (
        Scores(values=torch.tensor([0.0, float("nan")]), parts=GOOD.parts),
        r"values of Scores is nan for sample 'b' \(prompt 'y'\)\. A score must be finite",
    ),
    "not finite where scored": (
        Scores(values=torch.tensor([float("nan")] * 2), parts=GOOD.parts, scored=torch.tensor([False, True])),
        r"values of Scores is nan for sample 'b'",
    ),
    "part not finite": (
        Scores(values=GOOD.values, parts={"colour": torch.tensor([float("inf"), 0.0])}),
        r"parts\['colour'\] of Scores is inf for sample 'a'",
    ),
    "missing part": (Scores(values=GOOD.values), r"got components none, expected \['colour'\]"),
    "other part": (
        Scores(values=GOOD.values, parts={"colour": GOOD.values, "shape": GOOD.values}),
        r"got components \['colour', 'shape'\], expected \['colour'\].*declares in `parts`",
    ),
    "numbers for flags": (
        Scores(values=GOOD.values, parts=GOOD.parts, scored=torch.ones(2)),
        r"`scored` of Scores is Tensor tensor\(\[1., 1.\]\); expected None or a tensor of bool, one for each of 2 sampl",
    ),
    "one flag": (
        Scores(values=GOOD.values, parts=GOOD.parts, scored=torch.tensor(True)),
        r"`scored` of Scores is Tensor tensor\(True\); expected None or a tensor of bool",
    ),
    "above": (Scores(values=torch.tensor([0.0, 1.5]), parts=GOOD.parts), r"got scores from 0 to 1.5, expected 0 to 1"),
    "below": (
        Scores(values=torch.tensor([-0.1, 1.0]), parts=GOOD.parts),
        r"got scores from -0.1 to 1, expected 0 to 1",
    ),
}


@pytest.mark.parametrize("case", REPLIES)
def test_a_reply_that_the_spec_does_not_declare_is_refused(case: str) -> None:
    reply, says = REPLIES[case]
    with pytest.raises(RewardFailed, match=f"^reward.mine: {says}"):
        scored(lambda _: reply)


def test_a_reward_that_raises_is_named_and_its_error_is_the_cause() -> None:
    def fails(_: ScoreInput) -> Scores:
        raise ValueError("no face in the picture")

    with pytest.raises(RewardFailed, match=r"reward\.mine: raised ValueError: no face in the picture") as caught:
        scored(fails)
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_exit_inside_score_is_a_failure_of_the_reward() -> None:
    with pytest.raises(RewardFailed, match=r"reward.mine: called sys.exit\(0\) on a batch of 2 samples"):
        scored(lambda _: sys.exit(0))


def test_ctrl_c_inside_score_still_stops_the_run() -> None:
    def interrupted(_: ScoreInput) -> Scores:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scored(interrupted)


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[0], lambda x: x.detach()], ids=["whole", "row", "detached"])
def test_images_changed_in_place_are_refused(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def brightens(given: ScoreInput) -> Scores:
        view(given.of("image", reward="mine").stacked).add_(0.5)
        return GOOD

    with pytest.raises(RewardFailed, match=r"changed pixels in place.*images.clone\(\)"):
        scored(brightens)


def test_a_video_changed_in_place_is_refused() -> None:
    def cuts(given: ScoreInput) -> Scores:
        given.of("video", reward="mine").arrays[1][0] = 1.0
        return GOOD

    with pytest.raises(RewardFailed, match="changed pixels in place"):
        videos = Media(kind="video", values=(torch.zeros(2, 3, 4, 4), torch.zeros(5, 3, 4, 4)), rate=8.0)
        scored(cuts, videos, spec=dataclasses.replace(SPEC, media="video"))


def test_images_made_in_inference_mode_are_scored() -> None:
    with torch.inference_mode():
        images = torch.zeros(2, 3, 4, 4)
    assert scored(lambda _: GOOD, pictures(images)) is GOOD


def test_another_seed_of_torch_is_refused_and_draws_are_not() -> None:
    def reseeds(_: ScoreInput) -> Scores:
        torch.manual_seed(torch.initial_seed() + 1)
        return GOOD

    def draws(_: ScoreInput) -> Scores:
        torch.rand(3)
        return GOOD

    with torch.random.fork_rng(devices=[]):
        assert scored(draws) is GOOD
        with pytest.raises(RewardFailed, match="set the seed of torch's global generator"):
            scored(reseeds)


@pytest.mark.parametrize("fails", [False, True])
def test_another_working_folder_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()

    def moves(_: ScoreInput) -> Scores:
        os.chdir("weights")
        if fails:
            raise ValueError("no weights")
        return GOOD

    with pytest.raises(RewardFailed, match="raised ValueError: no weights" if fails else "to '.*weights'"):
        scored(moves)
    assert Path.cwd() == tmp_path


def test_an_object_that_is_not_a_reward_is_refused_when_it_is_built() -> None:
    with pytest.raises(RewardFailed, match=r"reward.mine: 'taste:build' returned dict, which has no method 'score'"):
        CheckedReward("reward.mine", {}, spec=SPEC)  # type: ignore[arg-type]


def test_a_close_that_raises_names_the_reward() -> None:
    def fails() -> None:
        raise OSError("device busy")

    with pytest.raises(RewardFailed, match=r"reward.mine: close\(\) raised OSError: device busy."):
        CheckedReward("reward.mine", Reward(lambda _: GOOD, fails), spec=SPEC).close()


def test_media_of_another_kind_are_refused_before_the_reward_runs() -> None:
    def never(_: ScoreInput) -> Scores:
        raise AssertionError("it was asked to score")

    with pytest.raises(RewardFailed, match=r"^reward\.mine: got text, expected image\.$"):
        scored(never, Media(kind="text", values=("a", "b")))
