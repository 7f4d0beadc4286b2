"""Which rewards a plan needs, and which track they score."""

from __future__ import annotations

import dataclasses

from plans import changed
from toy_specs import (
    ALGORITHM,
    BACKEND,
    ENGINE,
    MODEL,
    REWARD,
    having,
    make_plan,
    refusals,
)
from unirl.core.specs.capability import Cap, Needs
from unirl.core.specs.config import EvalConfig
from unirl.core.specs.part_config import RewardConfig
from unirl.core.specs.plan import Choice
from unirl.core.types.sampling import TextSamplingConfig


def test_rewards_that_are_backpropagated_must_be_differentiable_unless_they_are_only_shown() -> None:
    slope = REWARD.capabilities | {Cap.REWARD_DIFFERENTIABLE}
    follows = dataclasses.replace(ALGORITHM, needs=Needs(track="latent", reward="differentiable"))
    able = dataclasses.replace(BACKEND, capabilities=BACKEND.capabilities | {Cap.THROUGH_SAMPLER})
    plan = make_plan(
        algorithm=follows, backend=able, **{"reward.score": dataclasses.replace(REWARD, capabilities=slope)}
    )
    assert refusals(plan) == []
    (result,) = refusals(make_plan(algorithm=follows, backend=able))
    assert result.startswith("reward.score: algorithm 'grpo-like' needs 'reward-differentiable'")
    assert any(
        line.startswith("backend: algorithm 'grpo-like' needs 'through-sampler'")
        for line in refusals(make_plan(algorithm=follows))
    )
    shown = Choice(
        key="reward.shown",
        spec=dataclasses.replace(REWARD, name="shown"),
        config=RewardConfig(weight=0.0),
        dist="toy",
        version="1",
    )
    assert refusals(changed(plan, rewards={**plan.rewards, "shown": shown})) == []


def test_rewards_must_exist_weigh_something_and_score_what_is_made() -> None:
    assert any("no reward was chosen" in line for line in refusals(make_plan(rewards={})))
    zero = make_plan(**{"reward.score_config": RewardConfig(weight=0.0)})
    assert any("weight 0" in line for line in refusals(zero))
    video = make_plan(**{"reward.score": dataclasses.replace(REWARD, media="video")})
    assert refusals(video) == [
        "reward.score: reward 'score' scores video; stage 'image' of model 'toy' generates image."
    ]
    text = make_plan(**{"reward.score": dataclasses.replace(REWARD, media="text")})
    assert refusals(text) == ["reward.score: reward 'score' scores text; model 'toy' generates latent tracks."]


def test_without_a_need_for_rewards_there_need_be_none() -> None:
    algorithm = dataclasses.replace(ALGORITHM, needs=Needs(track="latent", reward="none"))
    assert refusals(make_plan(algorithm=algorithm, rewards={})) == []
    (result,) = refusals(make_plan(algorithm=algorithm, rewards={}, eval=EvalConfig(threshold=0.5)))
    assert result == "eval.threshold: got 0.5, but the plan has no reward; leave it out, or add a reward."


def test_of_several_tracks_a_reward_scores_those_of_its_medium_and_the_others_have_no_signal() -> None:
    both = MODEL.capabilities | {Cap.TEXT_STAGE}
    model = dataclasses.replace(MODEL, tracks={"caption": "text", **MODEL.tracks}, capabilities=both)
    engine = dataclasses.replace(ENGINE, capabilities=ENGINE.capabilities | {Cap.TEXT_ROLLOUT})
    plan = make_plan(model=model, engine=engine)
    image = plan.only
    any_kind = dataclasses.replace(ALGORITHM, needs=Needs())
    algorithm = dataclasses.replace(image.algorithm, spec=any_kind)
    caption = dataclasses.replace(image, name="caption", track="caption", sampling=TextSamplingConfig(), rewards=())
    plan = dataclasses.replace(
        plan, stages=tuple(dataclasses.replace(each, algorithm=algorithm) for each in (caption, image))
    )
    (result,) = refusals(plan)
    assert result == (
        "algorithm: stage 'caption' trains, and neither a reward nor credit of another stage gives it a signal. Add a "
        "reward that scores text."
    )


def test_a_stage_that_follows_gradients_needs_a_reward_that_counts_of_its_own() -> None:
    slope = REWARD.capabilities | {Cap.REWARD_DIFFERENTIABLE}
    plan = make_plan(
        algorithm=dataclasses.replace(ALGORITHM, needs=Needs(track="latent", reward="differentiable")),
        backend=having(BACKEND, Cap.THROUGH_SAMPLER),
        **{
            "reward.score": dataclasses.replace(REWARD, capabilities=slope),
            "reward.score_config": RewardConfig(weight=0),
        },
    )
    assert any(line.startswith("algorithm: stage 'image' is trained by the gradient") for line in refusals(plan))
