"""A reward that compares the samples of a group, on more workers than there are groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from unirl.core.roles import ScoreInput, Scores
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.runtime.actors import Actor
from unirl.runtime.cluster import Cluster
from unirl.runtime.config import RayConfig
from unirl.runtime.placement import places
from unirl.runtime.remote_parts import RemoteReward
from unirl.runtime.samples import Samples
from unirl.runtime.session import Session, WeightVersions
from unirl.runtime.turns import Turns


class RankInGroup:
    """How many others of its group a sample's image is brighter than."""

    def score(self, samples: ScoreInput) -> Scores:
        light = samples.of("image", reward="rank").stacked.mean(dim=(1, 2, 3))
        alike = torch.tensor([[one == other for other in samples.group_ids] for one in samples.group_ids])
        values = ((light[:, None] > light[None]) & alike).sum(dim=1).float()
        # Sample y has no score; a share without it is scored whole.
        scored = torch.tensor([sample != "y" for sample in samples.sample_ids])
        return Scores(values=values, scored=scored if "y" in samples.sample_ids else None)


class Here:
    """The cluster and its knowledge of samples, with every worker in this process."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []

    def run(self, calls: Sequence[Any], **_: Any) -> list[Scores]:
        shares = [cast("ScoreInput", call.args[1]) for call in calls]
        self.asked = [tuple(share.group_ids) for share in shares]
        return [RankInGroup().score(share) for share in shares]

    def needed(self, call: Any) -> Any:
        return call(lambda values: values)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7])
def test_scores_do_not_depend_on_the_number_of_workers(workers: int) -> None:
    groups = ("a", "a", "a", "b", "b", "b")
    light = torch.tensor([0.2, 0.9, 0.5, 0.1, 0.3, 0.7])
    samples = ScoreInput(
        sample_ids=tuple("uvwxyz"),
        inputs=Inputs.of_texts(("a ring",) * 6),
        metadata=({},) * 6,
        group_ids=groups,
        media=Media(kind="image", values=light[:, None, None, None].expand(6, 3, 2, 2)),
    )
    here = Here()
    session = Session(
        cluster=cast("Cluster", here),
        train=(),
        rollout=(),
        reference=(),
        reward=[Actor(place=place) for place in places(RayConfig(reward_workers=workers), on_cuda=False)[1:]],
        copies=1,
        turns=Turns(cast("Cluster", here), train=(), rollout=(), is_shared=False),
        versions=WeightVersions(trained=0, sampled=0),
    )
    reward = RemoteReward("rank", session, cast("Samples", here), scores_groups=True)
    assert reward.score(samples).values.tolist() == [0, 2, 1, 0, 1, 2]
    assert reward.score(samples).scored is not None and reward.score(samples).scored.tolist() == [True] * 4 + [
        False,
        True,
    ]
    assert sum("a" in asked for asked in here.asked) == sum("b" in asked for asked in here.asked) == 1
