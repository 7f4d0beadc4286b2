"""Credit that samples of a parent stage get from the rewards of their children."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import loop_toy
import pytest
import torch
from unirl.core.errors import BatchError
from unirl.core.specs.config import StageConfig
from unirl.core.specs.plan import Stage
from unirl.core.types.inputs import Inputs
from unirl.core.types.track import Status, Track
from unirl.loop.credit import credited

PARENTS = ("a", "b", "c")
CHILDREN = ("a", "a", "b", "a", "c")
"""Ragged, and in no order."""
REWARDS = (1.0, 4.0, 2.0, 1.0, 0.5)
OF = {
    "mean": [2.0, 2.0, 0.5],
    "max": [4.0, 2.0, 0.5],
    "sum": [6.0, 2.0, 0.5],
    "best": [4.0, 2.0, 0.5],
}


def track(name: str, ids: tuple[str, ...], *, parents: tuple[str, ...] | None = None, **values: Any) -> Track:
    rows = len(ids)
    return Track(
        name=name,
        sample_ids=ids,
        group_ids=parents or ids,
        parent_ids=parents,
        inputs=Inputs.of_texts(ids),
        metadata=({},) * rows,
        sample_weights=values.pop("weights", torch.ones(rows)),
        status=(Status.COMPLETED,) * rows,
        policy_version=(0,) * rows,
        **values,
    )


def stage(name: str, *, parent: str = "", credit: str = "none") -> Stage:
    settings = StageConfig(parent=parent, credit=credit)
    return dataclasses.replace(loop_toy.plan().only, name=name, settings=settings)


def tracks(*, rewards: tuple[float, ...] | None = REWARDS, **values: Any) -> dict[str, Track]:
    ids = tuple(f"{parent}/{row}" for row, parent in enumerate(CHILDREN))
    scores = None if rewards is None else torch.tensor(rewards)
    child = track("image", ids, parents=CHILDREN, rewards=scores, **values)
    return {"text": track("text", PARENTS), "image": child}


@pytest.mark.parametrize("how", OF)
def test_credit_is_what_its_name_says(how: str) -> None:
    result = credited(tracks(), [stage("text"), stage("image", parent="text", credit=how)])
    text, image = result["text"], result["image"]
    assert text.rewards is not None and text.rewards.tolist() == OF[how]
    assert text.reward_parts["image"].tolist() == OF[how]
    weights = [0.0, 1.0, 1.0, 0.0, 1.0] if how == "best" else [1.0] * 5
    assert image.sample_weights.tolist() == weights


def test_of_equally_good_samples_the_id_decides_which_one_trains() -> None:
    """Whatever the order of the rows."""
    given = tracks(rewards=(1.0, 1.0, 2.0, 1.0, 0.5))
    for order in ([0, 1, 2, 3, 4], [3, 0, 4, 1, 2]):
        shuffled = {"text": given["text"], "image": given["image"].select(order)}
        image = credited(shuffled, [stage("text"), stage("image", parent="text", credit="best")])["image"]
        trained = [name for name, weight in zip(image.sample_ids, image.sample_weights.tolist(), strict=True) if weight]
        assert sorted(trained) == ["a/3", "b/2", "c/4"]


def test_samples_without_weight_give_none_and_a_parent_without_samples_is_left_out() -> None:
    weights = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0])
    result = credited(tracks(weights=weights), [stage("text"), stage("image", parent="text", credit="mean")])
    expected = torch.tensor([1.0, math.nan, 0.5])
    torch.testing.assert_close(result["text"].rewards, expected, rtol=0, atol=0, equal_nan=True)
    assert result["text"].sample_weights.tolist() == [1.0, 0.0, 1.0]


def test_several_children_add_up_with_rewards_of_the_parents_own() -> None:
    given = tracks()
    given["text"] = dataclasses.replace(given["text"], rewards=torch.tensor([10.0, 0.0, 0.0]))
    given["video"] = dataclasses.replace(given["image"], name="video")
    stages = [stage("text"), *(stage(name, parent="text", credit="max") for name in ("image", "video"))]
    text = credited(given, stages)["text"]
    assert text.rewards is not None and text.rewards.tolist() == [18.0, 4.0, 1.0]
    assert set(text.reward_parts) == {"image", "video"}


def test_credit_goes_up_through_every_stage() -> None:
    given = tracks()
    ids = given["image"].sample_ids
    leaves = tuple(f"{name}/x" for name in ids)
    given["video"] = track("video", leaves, parents=ids, rewards=torch.tensor(REWARDS))
    given["image"] = dataclasses.replace(given["image"], rewards=None)
    stages = [
        stage("text"),
        stage("image", parent="text", credit="sum"),
        stage("video", parent="image", credit="mean"),
    ]
    text = credited(given, stages)["text"]
    assert text.rewards is not None and text.rewards.tolist() == OF["sum"]


def test_a_child_without_credit_or_without_rewards() -> None:
    assert credited(tracks(), [stage("text"), stage("image", parent="text")])["text"].rewards is None
    with pytest.raises(BatchError, match="track 'image' gives credit and has no rewards"):
        credited(tracks(rewards=None), [stage("text"), stage("image", parent="text", credit="mean")])
