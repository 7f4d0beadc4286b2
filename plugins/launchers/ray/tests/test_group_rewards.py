"""Samples sent to scoring workers: whole groups where a reward compares them, and the frames that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from unirl.core.roles import ScoreInput, Scores
from unirl.core.specs.memory import RewardProcesses
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media, spread
from unirl.launchers.ray.actors import Actor
from unirl.launchers.ray.cluster import Cluster
from unirl.launchers.ray.config import RayConfig
from unirl.launchers.ray.placement import places
from unirl.launchers.ray.remote_parts import RemoteReward
from unirl.launchers.ray.samples import Samples
from unirl.launchers.ray.session import Session, WeightVersions
from unirl.launchers.ray.turns import Turns
from unirl.transfer.remote_rows import dehydrated, hydrated
from unirl.transfer.tensor_store import TensorStore
from unirl.transfer.wire import packed, unpacked


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


def session_of(here: Here, *, workers: int) -> Session:
    scorers = RewardProcesses(rewards=(), count=workers, device="none")
    return Session(
        cluster=cast("Cluster", here),
        train=(),
        rollout=(),
        reference=(),
        reward=[Actor(place=place) for place in places(RayConfig(), on_cuda=False, rewards=[scorers])[1:]],
        copies=1,
        turns=Turns(cast("Cluster", here), train=(), rollout=(), is_shared=False),
        versions=WeightVersions(trained=0, sampled=0),
    )


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
    reward = RemoteReward("rank", session_of(here, workers=workers), cast("Samples", here), scores_groups=True)
    assert reward.score(samples).values.tolist() == [0, 2, 1, 0, 1, 2]
    assert reward.score(samples).scored is not None and reward.score(samples).scored.tolist() == [True] * 4 + [
        False,
        True,
    ]
    assert sum("a" in asked for asked in here.asked) == sum("b" in asked for asked in here.asked) == 1


class Brightness:
    """The mean of the pixels of the frames that come."""

    def score(self, samples: ScoreInput) -> Scores:
        return Scores(values=samples.of("video", reward="light").stacked.mean(dim=(1, 2, 3, 4)))


class Apart(Here):
    """Workers in this process that fetch what they score from the store of another."""

    def __init__(self) -> None:
        self.made = TensorStore("rollout-0", ask=self.ask, device=torch.device("cpu"))
        self.scoring = TensorStore("reward-0", ask=self.ask, device=torch.device("cpu"))

    def ask(self, owner: str, question: Any) -> list[torch.Tensor]:
        return {"rollout-0": self.made, "reward-0": self.scoring}[owner].answer(question)

    def run(self, calls: Sequence[Any], **_: Any) -> list[Scores]:
        # As a worker does, see `Worker.score`; packed, as calls of actors are.
        shares = [unpacked(packed(call.args[1])) for call in calls]
        return [Brightness().score(hydrated(share, self.scoring.fetch)) for share in shares]


def test_of_videos_workers_fetch_the_frames_that_a_reward_reads_and_no_others() -> None:
    """Bytes that go from process to process: those of the frames alone."""
    frames, size_px, count = 21, 16, 6
    videos = torch.rand(count, frames, 3, size_px, size_px)
    samples = ScoreInput(
        sample_ids=tuple("uvwxyz"),
        inputs=Inputs.of_texts(("a ring",) * count),
        metadata=({},) * count,
        group_ids=("a",) * count,
        media=Media(kind="video", values=videos, rate=8.0),
    )
    sent: list[int] = []
    for read, expected in ((None, range(frames)), (lambda total: spread(5, total), [0, 5, 10, 15, 20])):
        there = Apart()
        kept = dehydrated(samples, there.made.keep)
        reward = RemoteReward(
            "light", session_of(there, workers=2), cast("Samples", there), scores_groups=False, frames=read
        )
        torch.testing.assert_close(reward.score(kept).values, videos[:, list(expected)].mean(dim=(1, 2, 3, 4)))
        assert there.scoring.counts().bytes_fetched == there.made.counts().bytes_sent
        sent.append(there.made.counts().bytes_sent)
    frame_bytes = 3 * size_px * size_px * 4
    assert sent == [count * 21 * frame_bytes, count * 5 * frame_bytes]
