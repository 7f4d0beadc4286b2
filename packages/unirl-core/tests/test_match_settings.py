"""Settings that cannot work together are refused with their keys."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
from plans import changed
from toy_specs import ALGORITHM, ENGINE, MODEL, REWARD, make_plan, refusals, without
from unirl.core.errors import PluginBroken
from unirl.core.limits import limit
from unirl.core.specs.capability import Cap, Needs
from unirl.core.specs.config import AdvantageConfig, EvalConfig, TrainConfig
from unirl.core.types.sampling import LatentSamplingConfig, SdeStepsConfig, TextSamplingConfig


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"eta": 0.0}, "sampling.eta: algorithm 'grpo-like' takes ratios"),
        ({"kernel": "euler"}, "sampling.kernel: algorithm 'grpo-like' takes ratios"),
        (
            {"kernel": "dance-sde"},
            "sampling.kernel: got 'dance-sde'; engine 'inside' supports cps, euler, flow-sde.",
        ),
        ({"num_inference_steps": 0}, "sampling.num_inference_steps: got 0, expected 1 to 10000."),
        ({"guidance_mode": "double"}, "sampling.guidance_mode: got 'double'; engine 'inside' supports batched"),
        (
            {"sde": SdeStepsConfig(mode="fixed", steps=[3, 20])},
            "sampling.sde.steps: step 20 is past the last step 9. Steps count from 0.",
        ),
        (
            {"sde": SdeStepsConfig(mode="random", count=6, last=0.5)},
            "sampling.sde.count: got 6, expected 1 to 5, the steps of the pool",
        ),
        (
            {"sde": SdeStepsConfig(mode="window", window=11)},
            "sampling.sde.window: got 11, expected at most 10, the steps of the pool.",
        ),
        (
            {"sde": SdeStepsConfig(mode="window", window=2, overlap=2)},
            "sampling.sde.overlap: got 2, expected less than the window of 2 steps.",
        ),
        ({"sde": SdeStepsConfig(train_fraction=0.0)}, "sampling.sde.train_fraction: got 0.0, expected more than 0"),
        ({"sde": SdeStepsConfig(train_fraction=1.5)}, "sampling.sde.train_fraction: got 1.5, expected"),
        ({"sde": SdeStepsConfig(mode="none")}, "sampling.sde.mode: algorithm 'grpo-like' takes ratios"),
        ({"sde": SdeStepsConfig(mode="some")}, "sampling.sde.mode: got 'some', expected one of"),
        (
            {"sde": SdeStepsConfig(mode="fraction", first=0.5, last=0.5)},
            "sampling.sde.first: got first 0.5 and last 0.5",
        ),
        (
            {"sde": SdeStepsConfig(mode="fraction", first=0.01, last=0.05)},
            "sampling.sde.last: the range 0.01 to 0.05 of 10 steps",
        ),
        ({"sde": SdeStepsConfig(mode="random", count=1, per_group=True)}, "engine: sampling.sde.per_group needs"),
        (
            {"sde": SdeStepsConfig(mode="window", window=1, per_group=True)},
            "sampling.sde.per_group: got true, but mode 'window' with strategy 'progressive' draws no steps.",
        ),
        ({"sde": SdeStepsConfig(per_group=True)}, "sampling.sde.per_group: got true, but mode 'all' draws no steps."),
        ({"sde": SdeStepsConfig(mode="fixed", steps=[1, 1])}, "sampling.sde.steps: got [1, 1], which names a step"),
        ({"kernel": "cps", "eta": 1.5}, "sampling.eta: got 1.5, expected at most 1 with kernel 'cps'"),
        *(
            ({"kernel": "cps", "sde": SdeStepsConfig(**sde)}, f"sampling.sde.{says}, which makes the last step stochas")
            for sde, says in (
                ({"mode": "all"}, "mode: got all"),
                ({"mode": "fixed", "steps": [2, 9]}, "steps: got [2, 9]"),
                ({"mode": "fraction", "first": 0.5}, "last: got 1.0"),
                ({"mode": "random", "count": 1, "last": 1.0}, "last: got 1.0"),
                ({"mode": "window", "window": 2}, "last: got 1.0"),
                ({"mode": "window", "window": 4, "strategy": "random"}, "last: got 1.0"),
            )
        ),
        *(
            ({"sde": SdeStepsConfig(min_noise_std=0.5, **sde)}, "sampling.sde.min_noise_std: got 0.5, which needs one")
            for sde in (
                *({"mode": "all"}, {"mode": "fraction", "last": 0.5}, {"mode": "window", "window": 2}),
                *({"mode": "fixed", "steps": [1, 2]}, {"mode": "random", "count": 1, "per_group": True}),
            )
        ),
    ],
)
def test_sampling_that_cannot_work_is_refused(changes: dict[str, Any], says: str) -> None:
    result = refusals(make_plan(sampling=LatentSamplingConfig(**changes)))
    assert len(result) >= 1
    assert any(line.startswith(says) for line in result), result


@pytest.mark.parametrize("mode", [{"mode": "window", "window": 1}, {"mode": "fixed", "steps": [3]}])
def test_a_shared_stochastic_step_may_need_noise(mode: dict[str, Any]) -> None:
    assert refusals(make_plan(sampling=LatentSamplingConfig(sde=SdeStepsConfig(min_noise_std=0.5, **mode)))) == []


@pytest.mark.parametrize(
    "sde",
    [
        {"mode": "fraction", "last": 0.9},
        {"mode": "fixed", "steps": [0, 8]},
        # Windows start at 0 and 4, so none reaches step 9.
        {"mode": "window", "window": 4},
    ],
)
def test_a_kernel_without_noise_at_the_end_trains_on_the_steps_before(sde: dict[str, Any]) -> None:
    assert refusals(make_plan(sampling=LatentSamplingConfig(kernel="cps", sde=SdeStepsConfig(**sde)))) == []


def test_latents_in_16_bits_are_refused_where_nothing_rounds_them() -> None:
    sampling = LatentSamplingConfig(trajectory_dtype="bfloat16")
    assert refusals(make_plan(sampling=sampling)) == []
    stored = dataclasses.replace(ENGINE, samples=(("target",),))
    says = "sampling.trajectory_dtype: got 'bfloat16', expected 'float32': "
    assert any(
        line == f"{says}engine 'inside' reads stored samples and samples no trajectory."
        for line in refusals(make_plan(sampling=sampling, engine=stored))
    )
    follows = dataclasses.replace(ALGORITHM, needs=Needs(track="latent", reward="differentiable"))
    assert any(
        line.startswith(f"{says}algorithm 'grpo-like' computes the trajectory again")
        for line in refusals(make_plan(sampling=sampling, algorithm=follows))
    )
    (result,) = refusals(make_plan(sampling=LatentSamplingConfig(trajectory_dtype="int8")))
    assert result.startswith("sampling.trajectory_dtype: got 'int8', expected one of float32, bfloat16, float16.")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"guidance_mode": "double"}, "eval.sampling.guidance_mode: got 'double'; engine 'inside' supports batched"),
        ({"num_inference_steps": 0}, "eval.sampling.num_inference_steps: got 0, expected 1 to 10000."),
        ({"kernel": "dance-sde"}, "eval.sampling.kernel: got 'dance-sde'; engine 'inside' supports"),
        ({"eta": 0.5}, "eval.sampling.eta: got 0.5, expected 0: kernel 'euler' is deterministic."),
        (
            {"sde": SdeStepsConfig(mode="all")},
            "eval.sampling.sde.mode: got 'all', but kernel 'euler' with eta 0.0 makes no step",
        ),
    ],
)
def test_evaluation_is_held_to_what_training_is(changed: dict[str, Any], says: str) -> None:
    (result,) = refusals(make_plan(eval=EvalConfig(sampling=changed)))
    assert result.startswith(says)


def test_what_evaluation_takes_over_from_training_is_refused_once() -> None:
    (result,) = refusals(make_plan(sampling=LatentSamplingConfig(guidance_mode="double")))
    assert result.startswith("sampling.guidance_mode: ")


def test_noise_of_a_kernel_that_has_none_is_refused_where_no_algorithm_asks_for_it() -> None:
    plain = dataclasses.replace(ALGORITHM, needs=Needs(track="latent"))
    given = LatentSamplingConfig(kernel="euler", eta=0.3, sde=SdeStepsConfig(mode="none"))
    (result,) = refusals(make_plan(sampling=given, algorithm=plain))
    assert result.startswith("sampling.eta: got 0.3, expected 0: kernel 'euler' is deterministic.")
    assert refusals(make_plan(sampling=dataclasses.replace(given, eta=0.0), algorithm=plain)) == []


def test_guidance_of_evaluation_alone_is_asked_of_the_engine() -> None:
    expected = EvalConfig(sampling={"guidance_scale": 4.5})
    assert refusals(make_plan(eval=expected)) == []
    (result,) = refusals(make_plan(eval=expected, engine=without(ENGINE, Cap.GUIDANCE)))
    assert result.startswith("engine: guidance_scale 4.5 needs")


@pytest.mark.parametrize(
    ("section", "changes", "says"),
    [
        (
            "run",
            {"batch_invariant": True, "matmul_precision": "high"},
            "run.matmul_precision: got 'high' with run.batch_invariant, expected 'highest'.",
        ),
        ("run", {"device": "cudua"}, "run.device: got 'cudua', expected `auto`, `cpu`, `cuda` or `cuda:N`."),
        ("data", {"prompts_per_step": 0}, "data.prompts_per_step: got 0, expected 1 to 1000000."),
        ("data", {"samples_per_prompt": 1}, "data.samples_per_prompt: got 1, so every group has zero variance"),
        ("train", {"updates_per_step": 500}, "train.updates_per_step: got 500, expected at most 128"),
        ("train", {"micro_batch_size": -1}, "train.micro_batch_size: got -1, expected 0 or more."),
        (
            "train",
            {"micro_batch_tokens": 64},
            "train.micro_batch_tokens: got 64, but stage 'image' has no tokens to count. Set it to 0, and micro_batch_",
        ),
        ("train", {"replay": "both"}, "train.replay: got 'both', expected one of auto, stacked, serial."),
        (
            "train",
            {"detach_negative": True},
            "train.detach_negative: got true, but sampling.guidance_scale is 1, so there is no negative branch.",
        ),
        ("train", {"old_log_probs": "engine"}, "engine: train.old_log_probs=engine needs 'log-probs-gaussian'"),
        ("advantage", {"scope": "row"}, "advantage.scope: got 'row', expected one of group, global."),
        (
            "advantage",
            {"center": "global"},
            "advantage.center: got 'global' with advantage.scope=group: a group of equal rewards would be divided by",
        ),
        ("advantage", {"ddof": 2}, "advantage.ddof: got 2, expected one of 0, 1."),
        ("advantage", {"values": "elo"}, "advantage.values: got 'elo', expected one of scores, win-rate, normal"),
        ("advantage", {"keep_best": -1}, "advantage.keep_best: got -1, expected 0 to 1000000."),
        (
            "advantage",
            {"keep_best": 5, "keep_worst": 4},
            "advantage.keep_best: got keep_best 5 + keep_worst 4, expected at most 8, the samples of a group. Use "
            "fewer, or raise data.samples_per_prompt.",
        ),
        (
            "advantage",
            {"combine": "normalize-sum-normalize", "normalize": False},
            "advantage.combine: got 'normalize-sum-normalize', but advantage.normalize is false.",
        ),
        ("advantage", {"keep_worst": 9}, "advantage.keep_worst: got keep_worst 9, expected at most 8"),
        (
            "advantage",
            {"positive_factor": "scores"},
            "advantage.positive_factor: got 'scores'; the rewards of stage 'image' are score; did you mean 'score'?",
        ),
        (
            "advantage",
            {"positive_factor": "score"},
            "advantage.positive_factor: got 'score', whose scores can be negative (lowest -inf), which would",
        ),
        (
            "advantage",
            {"spread_penalty": 0.5},
            "advantage.spread_penalty: got 0.5, which takes two rewards with a weight, and there is 1. Add another",
        ),
    ],
)
def test_geometry_and_closed_sets_are_checked(section: str, changes: dict[str, Any], says: str) -> None:
    plan = make_plan()
    before = getattr(plan.only if section in ("train", "advantage", "sampling") else plan, section)
    plan = changed(plan, **{section: dataclasses.replace(before, **changes)})
    assert any(line.startswith(says) for line in refusals(plan)), refusals(plan)


def test_a_negative_branch_is_detached_where_guided_steps_are_replayed() -> None:
    guided = LatentSamplingConfig(guidance_scale=4.5)
    plan = changed(make_plan(), sampling=guided, train=TrainConfig(detach_negative=True))
    assert refusals(plan) == []
    points = dataclasses.replace(ALGORITHM, needs=Needs(track="latent"))
    (line,) = refusals(make_plan(sampling=guided, algorithm=points, train=TrainConfig(detach_negative=True)))
    assert line.startswith("train.detach_negative: got true, but algorithm 'grpo-like' replays no guided steps.")


def test_updates_are_counted_in_the_samples_that_are_kept() -> None:
    few = make_plan(advantage=AdvantageConfig(keep_best=1, keep_worst=1), train=TrainConfig(updates_per_step=32))
    assert refusals(few) == []
    (result,) = refusals(changed(few, train=TrainConfig(updates_per_step=33)))
    assert result.startswith("train.updates_per_step: got 33, expected at most 32, the samples of a rollout (data")
    assert "prompts_per_step 16 x 2 samples of each" in result


@pytest.mark.parametrize(
    "options",
    [{"values": "win-rate"}, {"keep_best": 2}, {"spread_penalty": 0.5}, {"positive_factor": "score"}],
    ids=str,
)
def test_settings_of_comparisons_are_refused_where_nothing_is_compared(options: dict[str, Any]) -> None:
    alone = dataclasses.replace(ALGORITHM, needs=dataclasses.replace(ALGORITHM.needs, reward="none"))
    plan = make_plan(algorithm=alone, rewards={})
    assert refusals(plan) == []
    ((key, value),) = options.items()
    (result,) = refusals(changed(plan, advantage=AdvantageConfig(**options)))
    assert result.startswith(f"advantage.{key}: got {value}, but algorithm 'grpo-like' does not compare the samples")


def test_an_algorithm_of_one_update_refuses_more() -> None:
    once = dataclasses.replace(ALGORITHM, needs=dataclasses.replace(ALGORITHM.needs, multi_update=False))
    assert refusals(make_plan(algorithm=once)) == []
    assert len(refusals(make_plan(algorithm=once, train=TrainConfig(updates_per_step=2)))) == 1


@dataclass
class Options:
    strength: float = limit(1.0, least=0)
    layers: int = 2


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"strength": 2, "layers": 3}, None),
        ({"strength": -1.0}, "sampling.options.strength: got -1.0, expected 0 or more."),
        ({"strength": "much"}, "sampling.options.strength: got 'much', expected a value of type float."),
        ({"layers": 1.5}, "sampling.options.layers: got 1.5, expected a value of type int."),
        ({"layer": 1}, "sampling.options.layer: Options has no such option; did you mean 'layers'? It has layers, st"),
    ],
)
def test_options_of_the_model_are_checked_as_its_dataclass_says(given: dict[str, Any], says: str | None) -> None:
    model = dataclasses.replace(MODEL, options={"image": f"{__name__}:Options"})
    sampling = LatentSamplingConfig(options=given)
    result = refusals(make_plan(sampling=sampling, model=model))
    assert (result == []) if says is None else result[0].startswith(says), result
    evaluated = refusals(make_plan(eval=EvalConfig(sampling={"options": given}), model=model))
    assert (evaluated == []) if says is None else evaluated[0].startswith(f"eval.{says}"), evaluated


@pytest.mark.parametrize(
    ("field", "words"), [("token_options", "whose logits depend on options"), ("restricts", "which restricts tokens")]
)
def test_texts_by_rules_of_their_model_need_an_engine_that_follows_them(field: str, words: str) -> None:
    ruled = dataclasses.replace(
        MODEL, tracks={"image": "text"}, capabilities={Cap.TEXT_STAGE, Cap.LORA}, **{field: frozenset({"image"})}
    )
    needs = Needs(track="text", log_probs="token")
    parts: dict[str, Any] = {
        "model": ruled,
        "algorithm": dataclasses.replace(ALGORITHM, needs=needs),
        "sampling": TextSamplingConfig(),
        "reward.score": dataclasses.replace(REWARD, media="text"),
    }
    able = ENGINE.capabilities | {Cap.TEXT_ROLLOUT, Cap.LOG_PROBS_TOKEN}
    (result,) = refusals(make_plan(**parts, engine=dataclasses.replace(ENGINE, capabilities=able)))
    assert result.startswith(f"engine: track 'image' of model 'toy', {words}, needs 'token-rules'; engine 'inside'")
    follows = dataclasses.replace(ENGINE, capabilities=able | {Cap.TOKEN_RULES})
    assert refusals(make_plan(**parts, engine=follows)) == []


def test_videos_need_a_rate_of_the_request_or_of_the_model() -> None:
    """For a model without a frame rate, and for one that states it."""
    score = {"reward.score": dataclasses.replace(REWARD, media="video")}
    (result,) = refusals(make_plan(**score, sampling=LatentSamplingConfig(frames=5)))
    assert result.startswith("sampling.fps: got 0 for videos, and model 'toy' states no rate of its own")
    given = LatentSamplingConfig(frames=5, fps=8.0)
    assert refusals(make_plan(**score, sampling=given)) == []
    model = dataclasses.replace(MODEL, fps=16.0)
    plain = LatentSamplingConfig(frames=5)
    assert refusals(make_plan(**score, sampling=plain, model=model)) == []


def test_options_that_nobody_reads_are_refused() -> None:
    sampling = LatentSamplingConfig(options={"strength": 2.0})
    assert refusals(make_plan(sampling=sampling)) == [
        "sampling.options: got strength; model 'toy' has no options of track 'image'. Remove them."
    ]
    model = dataclasses.replace(MODEL, options={"image": f"{__name__}:Options"}, bridges={"inside": "toy:BRIDGE"})
    (result,) = refusals(
        make_plan(sampling=sampling, model=model, engine=dataclasses.replace(ENGINE, needs_bridge=True))
    )
    assert result.startswith("sampling.options: engine 'inside' has a pipeline of its own, which takes no options")
    reading = dataclasses.replace(model, bridged_options=frozenset({"inside"}))
    bridged = make_plan(sampling=sampling, model=reading, engine=dataclasses.replace(ENGINE, needs_bridge=True))
    assert refusals(bridged) == []
    broken = dataclasses.replace(MODEL, options={"image": "nowhere:Options"})
    with pytest.raises(PluginBroken, match="names 'nowhere:Options' as its options"):
        refusals(make_plan(sampling=sampling, model=broken))
