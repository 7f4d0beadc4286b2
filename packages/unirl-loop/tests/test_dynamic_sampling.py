"""Groups without spread are left out and others drawn in their place, in every way that a loop makes rollouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch
from loop_toy import Ran, ToyBackend, parts, plan, run
from plans import changed
from unirl.core.data.prompts import PromptOrder
from unirl.core.errors import RewardFailed
from unirl.core.match.match import match
from unirl.core.roles import Job, ScoreInput, Scores, TrainReport
from unirl.core.specs.config import DataConfig, StageConfig
from unirl.core.specs.plan import Plan, Stage
from unirl.core.types.inputs import Inputs
from unirl.core.types.track import Status, Track
from unirl.loop.dynamic_sampling import UsefulGroups, prompt_groups, with_spread


class Easy:
    """Samples of prompts named here are told apart; those of all others get one reward."""

    def __init__(self, *useful: str) -> None:
        self.useful = useful
        self.seen: list[str] = []

    def score(self, samples: ScoreInput) -> Scores:
        ids = [group.split("/")[1] for group in samples.group_ids]
        self.seen += list(dict.fromkeys(ids))
        number = [int(sample.rsplit("/", 1)[1]) for sample in samples.sample_ids]
        return Scores(
            values=torch.tensor([float(n) if i in self.useful else 1.0 for i, n in zip(ids, number, strict=True)])
        )

    def close(self) -> None: ...


class Noting(ToyBackend):
    """A backend that notes which groups it is trained on."""

    def train(self, jobs: Sequence[Job], *, progress: float) -> TrainReport:
        self.groups = [*getattr(self, "groups", []), list(jobs[0].track.groups())]
        return super().train(jobs, progress=progress)


def a_plan(*, rounds: int, groups: int = 2, **run: Any) -> Plan:
    toy = plan(groups=groups, run={"max_steps": 1, **run})
    data = dataclasses.replace(toy.data, dynamic_sampling_rounds=rounds)
    return dataclasses.replace(toy, data=data)


def trained(reward: Easy, toy: Plan) -> tuple[Ran, list[list[str]]]:
    backend = Noting()
    ran = run(parts(backend=backend, rewards={"light": reward}), toy)
    return ran, backend.groups


def spare(toy: Plan, step: int = 0) -> list[str]:
    order = PromptOrder(6, toy.data.prompts_per_step, seed=toy.run.seed, shuffle=toy.data.shuffle)
    return [f"p{row}" for row in order.spare(step, 50)]


def test_a_step_has_spare_prompts_in_an_order_of_its_own() -> None:
    order = PromptOrder(50, 4, seed=3)
    for step in range(30):
        assert sorted([*order.step(step), *order.spare(step, 50)]) == list(range(50))
    assert order.spare(0, 50) != order.spare(1, 50)
    assert PromptOrder(50, 4, seed=3).spare(7, 9) == order.spare(7, 50)[:9], "a function of seed and step alone"


@pytest.mark.parametrize("run_settings", [{}, {"reward_overlap_groups": 1}, {"max_staleness": 1}], ids=str)
def test_a_group_without_spread_makes_room_for_another(run_settings: dict[str, Any]) -> None:
    toy = a_plan(rounds=4, **run_settings)
    others = spare(toy)
    reward = Easy("p1", others[1])
    ran, groups = trained(reward, toy)
    assert groups == [["r0/p1", f"r0/{others[1]}"]]
    metrics = ran.steps[0].data["metrics"]
    # Two of the step's own; then one missing of two, half of them useful: two more, which has the one that is wanted.
    assert reward.seen == ["p0", "p1", *others[:2]]
    assert (metrics["groups_drawn"], metrics["groups_without_spread"]) == (4, 2)
    assert ran.steps[0].data["samples"] == 4


def test_surplus_groups_are_left_out_and_counted() -> None:
    toy = a_plan(rounds=4)
    reward = Easy("p1", *spare(toy))
    ran, groups = trained(reward, toy)
    assert groups == [["r0/p1", f"r0/{spare(toy)[0]}"]]
    assert ran.steps[0].data["metrics"]["groups_drawn"] == 4
    assert ran.steps[0].data["metrics"]["groups_without_spread"] == 1


def test_a_full_step_draws_nothing() -> None:
    ran, groups = trained(Easy("p0", "p1"), a_plan(rounds=4))
    assert groups == [["r0/p0", "r0/p1"]]
    assert ran.steps[0].data["metrics"]["groups_drawn"] == 2


def test_without_rounds_every_group_stays() -> None:
    ran, groups = trained(Easy("p0"), a_plan(rounds=0))
    assert groups == [["r0/p0", "r0/p1"]]
    assert "groups_drawn" not in ran.steps[0].data["metrics"]


def test_too_few_useful_groups_are_said_and_trained_on() -> None:
    toy = a_plan(rounds=1)
    ran, groups = trained(Easy("p0"), toy)
    assert groups == [["r0/p0"]]
    (finding,) = [event.data["text"] for event in ran.events if event.kind == "finding"]
    assert "data.dynamic_sampling_rounds: the step trains on 1 groups fewer" in finding


def test_no_useful_group_at_all_ends_the_run() -> None:
    reward = Easy()
    with pytest.raises(RewardFailed, match=r"data.dynamic_sampling_rounds: none of the 6 groups drawn in 3 rounds"):
        trained(reward, a_plan(rounds=9))
    assert len(reward.seen) == len(set(reward.seen)) == 6, "no prompt twice in a step"


def test_later_steps_draw_again_and_a_resumed_run_draws_the_same() -> None:
    toy = a_plan(rounds=4, max_steps=3)
    useful = [f"p{n}" for n in (0, 2, 3, 5)]
    _, groups = trained(Easy(*useful), toy)
    backend = Noting()
    run(parts(backend=backend, rewards={"light": Easy(*useful)}), toy, start=1)
    assert backend.groups == groups[1:]
    assert all(len(step) == 2 for step in groups)


def refusals(toy: Plan) -> Collection[str]:
    return [str(reason) for reason in match(toy).reasons if reason.key == "data.dynamic_sampling_rounds"]


def test_what_cannot_be_refilled_is_refused() -> None:
    toy = plan()
    assert not refusals(toy)
    for data, text in (
        (DataConfig(prompts_per_step=4, samples_per_prompt=1, dynamic_sampling_rounds=1), "a group of 1 always is one"),
        (DataConfig(prompts_per_step=4, samples_per_prompt=2, dynamic_sampling_rounds=-1), "expected 0 or more"),
    ):
        (refusal,) = refusals(changed(toy, data=data))
        assert text in refusal


def stage(name: str, *, parent: str = "", trains: bool = True) -> Stage:
    own = dataclasses.replace(plan().only, name=name, settings=StageConfig(parent=parent))
    return own if trains else dataclasses.replace(own, algorithm=None)


def track(name: str, parents: Sequence[str], number: int, rewards: Sequence[float], **values: Any) -> Track:
    """`number` samples of each parent, which are its groups."""
    of = tuple(parent for parent in parents for _ in range(number))
    ids = tuple(f"{parent}/{row % number}" for row, parent in enumerate(of))
    assert len(ids) == len(rewards)
    values.setdefault("sample_weights", torch.ones(len(ids)))
    return Track(
        name=name,
        sample_ids=ids,
        group_ids=of,
        parent_ids=of,
        inputs=Inputs.of_texts(ids),
        metadata=({},) * len(ids),
        status=(Status.COMPLETED,) * len(ids),
        policy_version=(0,) * len(ids),
        rewards=torch.tensor(rewards),
        **values,
    )


PER_PROMPT = {
    # No two images and no two texts differ.
    "equal": [1.0, 1.0, 1.0, 1.0],
    # Images of one text differ, and the means of both texts are 2.
    "images": [1.0, 3.0, 2.0, 2.0],
    # Images of one text agree, and the means are 0 and 1.
    "texts": [0.0, 0.0, 1.0, 1.0],
    # The last image has weight 0; the others, and the means, are 1.
    "unweighted": [1.0, 1.0, 1.0, 5.0],
}


def written(*prompts: str) -> dict[str, Track]:
    """Two texts of each prompt, with the mean reward of their two images."""
    scores = [PER_PROMPT[prompt] for prompt in prompts]
    means = [mean for one in scores for mean in ((one[0] + one[1]) / 2, (one[2] + one[3]) / 2)]
    means = [1.0 if prompts[row // 2] == "unweighted" else mean for row, mean in enumerate(means)]
    text = track("text", prompts, 2, means)
    weights = torch.tensor([0.0 if p == "unweighted" and n == 3 else 1.0 for p in prompts for n in range(4)])
    image = track("image", text.sample_ids, 2, [score for one in scores for score in one], sample_weights=weights)
    return {"text": text, "image": image}


@pytest.mark.parametrize(
    ("trained", "useful"),
    [(("text",), ["texts"]), (("image",), ["images"]), (("text", "image"), ["images", "texts"])],
)
def test_a_prompt_stays_while_one_stage_that_trains_can_learn_from_it(
    trained: tuple[str, ...], useful: list[str]
) -> None:
    stages = [stage("text", trains="text" in trained), stage("image", parent="text", trains="image" in trained)]
    tracks = written(*PER_PROMPT)
    groups = prompt_groups(tracks, stages)
    # Two texts and four images of each prompt, in their order.
    for number, name in enumerate(PER_PROMPT):
        assert groups[name] == {
            "text": [2 * number, 2 * number + 1],
            "image": [4 * number + row for row in range(4)],
        }
    assert with_spread(tracks, groups, stages) == useful


def test_samples_of_a_prompt_are_drawn_and_dropped_together() -> None:
    stages = [stage("text"), stage("image", parent="text")]
    useful = UsefulGroups(stages, wanted=2)
    useful.add(written("equal", "images"))
    # One of two was useful, and one is missing: two more, of which one is left.
    assert useful.num_to_draw(1) == 1
    useful.add(written("texts"))
    tracks, drawn = useful.chosen()
    ids = {name: [sample.split("/")[0] for sample in track.sample_ids] for name, track in tracks.items()}
    assert ids == {"text": ["images"] * 2 + ["texts"] * 2, "image": ["images"] * 4 + ["texts"] * 4}
    assert (drawn.num_groups, drawn.num_without_spread, drawn.num_missing) == (3, 1, 0)
