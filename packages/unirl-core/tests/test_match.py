"""What fits together, and what the refusal says."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
from plans import changed, one_stage
from unirl.core.errors import PluginBroken
from unirl.core.limits import Reason, limit
from unirl.core.loop.build import with_batch_invariance
from unirl.core.match.match import match, match_parts
from unirl.core.specs.capability import Cap, Needs, Support
from unirl.core.specs.config import (
    AdvantageConfig,
    BackendConfig,
    DataConfig,
    EvalConfig,
    PartConfig,
    RewardConfig,
    RunConfig,
    TrainConfig,
)
from unirl.core.specs.plan import Choice, Plan
from unirl.core.specs.spec import AlgorithmSpec, BackendSpec, EngineSpec, LauncherSpec, ModelSpec, RewardSpec
from unirl.core.types.sampling import LatentSamplingConfig, SdeStepsConfig, TextSamplingConfig
from unirl.engine_host.config import ExternalConfig
from unirl.engine_host.text_config import ExternalTextConfig

NATIVE, NO = Support.NATIVE, Support.NO
PARTS = {"summary": "toy", "build": "toy:build", "config": "toy:Config"}

MODEL = ModelSpec(
    name="toy",
    tracks={"image": "latent"},
    trainable="net",
    capabilities={Cap.LATENT_STAGE: NATIVE, Cap.LORA: NATIVE, Cap.GUIDANCE: NATIVE},
    **PARTS,
)
ENGINE = EngineSpec(
    name="inside",
    kernels=("flow-sde", "cps", "euler"),
    capabilities={
        cap: NATIVE
        for cap in (
            Cap.LATENT_ROLLOUT,
            Cap.SIGMAS,
            Cap.INITIAL_NOISE,
            Cap.STEP_NOISE,
            Cap.SDE_STEPS,
            Cap.TRAJECTORY_WINDOW,
            Cap.GUIDANCE,
            Cap.WEIGHTS_SHARED,
        )
    },
    **PARTS,
)
BACKEND = BackendSpec(
    name="plain",
    capabilities={Cap.TRAIN_LORA: NATIVE, Cap.TRAIN_FULL: NATIVE, Cap.REFERENCE_ADAPTER_OFF: NATIVE},
    **PARTS,
)
ALGORITHM = AlgorithmSpec(
    name="grpo-like",
    needs=Needs(track="latent", trajectory="window", log_probs="gaussian", stochastic=True),
    when={"kl_coef": Needs(reference="policy")},
    **PARTS,
)
REWARD = RewardSpec(name="score", scale="0 to 1", media="image", capabilities={Cap.REWARD_SAMPLE: NATIVE}, **PARTS)


@dataclass
class Backend(BackendConfig):
    trains: str = "lora"


@dataclass
class Algorithm(PartConfig):
    kl_coef: float = 0.0


def make_plan(**changes: Any) -> Plan:
    def choice(key: str, spec: Any, config: PartConfig) -> Any:
        return Choice(
            key=key, spec=changes.pop(key, spec), config=changes.pop(f"{key}_config", config), dist="toy", version="1"
        )

    plan = one_stage(
        model=choice("model", MODEL, PartConfig()),
        engine=choice("engine", ENGINE, PartConfig()),
        backend=choice("backend", BACKEND, Backend()),
        algorithm=choice("algorithm", ALGORITHM, Algorithm()),
        rewards={"score": choice("reward.score", REWARD, RewardConfig())},
        track="image",
        sampling=LatentSamplingConfig(),
        data=DataConfig(train="prompts.txt"),
    )
    return changed(plan, **changes)


def refusals(plan: Plan) -> list[str]:
    return [str(reason) for reason in match(plan).reasons]


def without(spec: Any, cap: Cap, support: Support = NO) -> Any:
    return dataclasses.replace(spec, capabilities={**spec.capabilities, cap: support})


def test_parts_that_fit_are_accepted() -> None:
    assert refusals(make_plan()) == []
    assert match_parts(model=MODEL, engine=ENGINE, algorithm=ALGORITHM, backend=BACKEND, rewards={"r": REWARD}).accepted


def test_every_refusal_is_one_sentence_with_its_key() -> None:
    plan = make_plan(engine=without(ENGINE, Cap.SIGMAS))
    assert refusals(plan) == [
        "engine: algorithm 'grpo-like', which trains on trajectories, needs 'sigmas'; engine 'inside' states 'no'."
    ]


def test_what_a_spec_does_not_state_is_refused_and_named_so() -> None:
    capabilities = {cap: support for cap, support in ENGINE.capabilities.items() if cap is not Cap.STEP_NOISE}
    result = refusals(make_plan(engine=dataclasses.replace(ENGINE, capabilities=capabilities)))
    assert result == [
        "engine: algorithm 'grpo-like', which trains on trajectories, needs 'step-noise'; engine 'inside' does not state it."
    ]


@pytest.mark.parametrize("cap", [Cap.LATENT_ROLLOUT, Cap.SIGMAS, Cap.INITIAL_NOISE, Cap.STEP_NOISE, Cap.SDE_STEPS])
def test_an_engine_must_have_what_trajectories_need(cap: Cap) -> None:
    assert len(refusals(make_plan(engine=without(ENGINE, cap)))) == 1


def test_a_full_trajectory_is_a_window_too() -> None:
    engine = without(without(ENGINE, Cap.TRAJECTORY_WINDOW), Cap.TRAJECTORY_FULL, NATIVE)
    assert refusals(make_plan(engine=engine)) == []
    assert len(refusals(make_plan(engine=without(ENGINE, Cap.TRAJECTORY_WINDOW)))) == 1


def test_an_engine_that_can_never_get_the_weights_is_refused() -> None:
    result = refusals(make_plan(engine=without(ENGINE, Cap.WEIGHTS_SHARED)))
    assert len(result) == 1
    assert "always come from the initial policy" in result[0]
    takes_lora = without(without(ENGINE, Cap.WEIGHTS_SHARED), Cap.WEIGHTS_LORA, NATIVE)
    assert refusals(make_plan(engine=takes_lora)) == []
    assert refusals(make_plan(engine=takes_lora, backend_config=Backend(trains="full"))) != []


def test_a_setting_can_raise_a_need() -> None:
    with_kl = {"algorithm_config": Algorithm(kl_coef=0.1)}
    assert refusals(make_plan(**with_kl)) == [], "LoRA: the adapter can be switched off"
    result = refusals(make_plan(**with_kl, backend_config=Backend(trains="full")))
    assert result == [
        "backend: algorithm 'grpo-like' with a KL penalty to the reference policy needs 'reference-copy'; "
        "backend 'plain' does not state it."
    ]


def test_a_text_algorithm_is_refused_on_a_latent_model() -> None:
    text = dataclasses.replace(ALGORITHM, needs=Needs(track="text"))
    assert any("trains text tracks" in line for line in refusals(make_plan(algorithm=text)))


def test_an_algorithm_with_a_critic_needs_a_backend_that_keeps_one_for_either_kind_of_track() -> None:
    judged = dataclasses.replace(ALGORITHM, name="ppo-like", needs=Needs(track="text", critic=True), when={})
    model = dataclasses.replace(MODEL, tracks={"text": "text"}, capabilities={Cap.TEXT_STAGE: NATIVE, Cap.LORA: NATIVE})
    engine = without(without(ENGINE, Cap.TEXT_ROLLOUT, NATIVE), Cap.LOG_PROBS_TOKEN, NATIVE)
    keeps = without(BACKEND, Cap.CRITIC, NATIVE)

    def reasons(**parts: Any) -> list[str]:
        chosen = {"model": model, "engine": engine, "algorithm": judged, "backend": keeps, "rewards": {}, **parts}
        return [str(reason) for reason in match_parts(**chosen).reasons]

    assert reasons() == []
    for support, says in ((NO, "states 'no'"), (Support.UNKNOWN, "does not state it")):
        assert reasons(backend=without(BACKEND, Cap.CRITIC, support)) == [
            f"backend: algorithm 'ppo-like' needs 'critic'; backend 'plain' {says}."
        ]
    on_latents = dataclasses.replace(
        ALGORITHM, name="ppo-like", needs=dataclasses.replace(ALGORITHM.needs, critic=True)
    )
    assert reasons(model=MODEL, engine=ENGINE, algorithm=on_latents) == []
    assert reasons(model=MODEL, engine=ENGINE, algorithm=on_latents, backend=without(BACKEND, Cap.CRITIC, NO)) == [
        "backend: algorithm 'ppo-like' needs 'critic'; backend 'plain' states 'no'."
    ]


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
    ],
)
def test_sampling_that_cannot_work_is_refused(changes: dict[str, Any], says: str) -> None:
    result = refusals(make_plan(sampling=LatentSamplingConfig(**changes)))
    assert len(result) >= 1
    assert any(line.startswith(says) for line in result), result


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
    ],
)
def test_evaluation_is_held_to_what_training_is(changed: dict[str, Any], says: str) -> None:
    (result,) = refusals(make_plan(eval=EvalConfig(sampling=changed)))
    assert result.startswith(says)


def test_what_evaluation_takes_over_from_training_is_refused_once() -> None:
    (result,) = refusals(make_plan(sampling=LatentSamplingConfig(guidance_mode="double")))
    assert result.startswith("sampling.guidance_mode: ")


def test_guidance_of_evaluation_alone_is_asked_of_the_engine() -> None:
    expected = EvalConfig(sampling={"guidance_scale": 4.5})
    assert refusals(make_plan(eval=expected)) == []
    (result,) = refusals(make_plan(eval=expected, engine=without(ENGINE, Cap.GUIDANCE)))
    assert result.startswith("engine: guidance_scale 4.5 needs")


@pytest.mark.parametrize(
    ("section", "changes", "says"),
    [
        ("run", {"device": "cudua"}, "run.device: got 'cudua', expected `auto`, `cpu`, `cuda` or `cuda:N`."),
        ("data", {"prompts_per_step": 0}, "data.prompts_per_step: got 0, expected 1 to 1000000."),
        ("data", {"samples_per_prompt": 1}, "data.samples_per_prompt: got 1, so every group has zero variance"),
        ("train", {"updates_per_step": 500}, "train.updates_per_step: got 500, expected at most 128"),
        ("train", {"micro_batch_size": -1}, "train.micro_batch_size: got -1, expected 0 or more."),
        ("train", {"replay": "both"}, "train.replay: got 'both', expected one of stacked, serial."),
        ("train", {"old_log_probs": "engine"}, "engine: train.old_log_probs=engine needs 'log-probs-gaussian'"),
        ("advantage", {"scope": "row"}, "advantage.scope: got 'row', expected one of group, global."),
        ("advantage", {"ddof": 2}, "advantage.ddof: got 2, expected one of 0, 1."),
        ("advantage", {"values": "elo"}, "advantage.values: got 'elo', expected one of scores, win-rate, normal"),
        ("advantage", {"keep_best": -1}, "advantage.keep_best: got -1, expected 0 to 1000000."),
        (
            "advantage",
            {"keep_best": 5, "keep_worst": 4},
            "advantage.keep_best: got keep_best 5 + keep_worst 4, expected at most 8, the samples of a group. Use "
            "fewer, or raise data.samples_per_prompt.",
        ),
        ("advantage", {"keep_worst": 9}, "advantage.keep_worst: got keep_worst 9, expected at most 8"),
    ],
)
def test_geometry_and_closed_sets_are_checked(section: str, changes: dict[str, Any], says: str) -> None:
    plan = make_plan()
    before = getattr(plan.only if section in ("train", "advantage", "sampling") else plan, section)
    plan = changed(plan, **{section: dataclasses.replace(before, **changes)})
    assert any(line.startswith(says) for line in refusals(plan)), refusals(plan)


def test_updates_are_counted_in_the_samples_that_are_kept() -> None:
    few = make_plan(advantage=AdvantageConfig(keep_best=1, keep_worst=1), train=TrainConfig(updates_per_step=32))
    assert refusals(few) == []
    (result,) = refusals(changed(few, train=TrainConfig(updates_per_step=33)))
    assert result.startswith("train.updates_per_step: got 33, expected at most 32, the samples of a rollout (data")
    assert "prompts_per_step 16 x 2 samples of each" in result


@pytest.mark.parametrize("options", [{"values": "win-rate"}, {"keep_best": 2}, {"keep_worst": 2}], ids=str)
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


def test_rewards_that_are_backpropagated_must_be_differentiable_unless_they_are_only_shown() -> None:
    slope = {**REWARD.capabilities, Cap.REWARD_DIFFERENTIABLE: NATIVE}
    follows = dataclasses.replace(ALGORITHM, needs=Needs(track="latent", reward="differentiable"))
    able = dataclasses.replace(BACKEND, capabilities={**BACKEND.capabilities, Cap.THROUGH_SAMPLER: NATIVE})
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


def test_parts_fit_when_one_way_of_training_does() -> None:
    kl = dataclasses.replace(ALGORITHM, needs=dataclasses.replace(ALGORITHM.needs, reference="policy"))
    lora_only = dataclasses.replace(
        BACKEND, capabilities={Cap.TRAIN_LORA: NATIVE, Cap.REFERENCE_ADAPTER_OFF: NATIVE, Cap.TRAIN_FULL: Support.NO}
    )

    def found(**parts: Any) -> list[str]:
        return [
            str(reason)
            for reason in match_parts(**{"model": MODEL, "engine": ENGINE, "algorithm": kl, **parts}).reasons
        ]

    assert found(backend=lora_only) == []
    assert found(model=without(MODEL, Cap.LORA), backend=lora_only) == [
        "model: training LoRA adapters needs 'lora'; model 'toy' states 'no'."
    ]


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


def test_videos_need_a_rate_of_the_request_or_of_the_model() -> None:
    """Of a model that states none, and of one that does."""
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
    broken = dataclasses.replace(MODEL, options={"image": "nowhere:Options"})
    with pytest.raises(PluginBroken, match="names 'nowhere:Options' as its options"):
        refusals(make_plan(sampling=sampling, model=broken))


def test_guidance_needs_both_the_engine_and_the_model() -> None:
    sampling = LatentSamplingConfig(guidance_scale=4.5)
    assert refusals(make_plan(sampling=sampling)) == []
    assert len(refusals(make_plan(sampling=sampling, engine=without(ENGINE, Cap.GUIDANCE)))) == 1
    assert len(refusals(make_plan(sampling=sampling, model=without(MODEL, Cap.GUIDANCE)))) == 1


OWN_WEIGHTS = dataclasses.replace(
    ENGINE,
    capabilities={**ENGINE.capabilities, Cap.WEIGHTS_SHARED: NO, Cap.WEIGHTS_FULL: NATIVE, Cap.WEIGHTS_LORA: NATIVE},
)


@dataclass
class Placed(PartConfig):
    placement: str = "trainside"


def ahead_plan(*, staleness: Any = "any", old_log_probs: str = "replay", **changes: Any) -> Plan:
    algorithm = dataclasses.replace(ALGORITHM, needs=dataclasses.replace(ALGORITHM.needs, staleness=staleness))
    changes = {"engine": OWN_WEIGHTS, "algorithm": algorithm, **changes}
    engine = changes["engine"]
    changes["engine"] = dataclasses.replace(
        engine, capabilities={**engine.capabilities, Cap.LOG_PROBS_GAUSSIAN: NATIVE}
    )
    return make_plan(run=RunConfig(max_staleness=1), train=TrainConfig(old_log_probs=old_log_probs), **changes)


def launched(placement: str, separates: dict[str, Any] | None) -> Any:
    spec = LauncherSpec(name="cluster", separates=separates, **PARTS)
    return Choice(key="launcher", spec=spec, config=Placed(placement=placement), dist="toy", version="1")


def test_rollouts_ahead_need_an_algorithm_that_states_that_it_can_use_them() -> None:
    assert refusals(ahead_plan()) == []
    for staleness, says in (("unstated", "does not state that it can"), ("none", "cannot with these settings")):
        (result,) = refusals(ahead_plan(staleness=staleness))
        assert result == (
            "run.max_staleness: got 1, which trains on samples from older weights; algorithm 'grpo-like' "
            f"{says}. Use 0."
        )


def test_a_setting_of_the_algorithm_can_take_it_back() -> None:
    plan = ahead_plan()
    strict = dataclasses.replace(plan.only.algorithm.spec, when={"kl_coef": Needs(staleness="none")})
    plan = changed(plan, algorithm=dataclasses.replace(plan.only.algorithm, spec=strict))
    assert refusals(plan) == []
    plan.only.algorithm.config.kl_coef = 0.1  # type: ignore[attr-defined]
    assert len(refusals(plan)) == 1


def test_a_ratio_corrects_for_staleness_with_the_engines_log_probs_alone() -> None:
    assert refusals(ahead_plan(staleness="ratio", old_log_probs="engine")) == []
    (result,) = refusals(ahead_plan(staleness="ratio"))
    assert result.startswith("train.old_log_probs: got 'replay', which takes ratios to the current weights")
    assert result.endswith("Set train.old_log_probs=engine.")


@pytest.mark.parametrize("launcher", [None, launched("trainside", None)])
def test_rollouts_ahead_need_weights_that_training_does_not_change(launcher: Any) -> None:
    assert refusals(ahead_plan(launcher=launcher)) == []
    (result,) = refusals(ahead_plan(engine=ENGINE, launcher=launcher))
    assert result.startswith("run.max_staleness: got 1; engine 'inside' shares its weights with training")


@pytest.mark.parametrize("engine", [ENGINE, OWN_WEIGHTS])
def test_workers_that_train_and_generate_cannot_do_both_at_once(engine: EngineSpec) -> None:
    separates = {"placement": "separate"}
    assert refusals(ahead_plan(engine=engine, launcher=launched("separate", separates))) == []
    (result,) = refusals(ahead_plan(engine=engine, launcher=launched("trainside", separates)))
    assert result == (
        "launcher.placement: got 'trainside', where the same workers generate and train; run.max_staleness=1 needs both "
        "to run at the same time. Set launcher.placement=separate."
    )


@pytest.mark.parametrize("ahead", [2, 3, 1000])
def test_any_number_of_rollouts_may_be_ahead(ahead: int) -> None:
    assert refusals(dataclasses.replace(ahead_plan(), run=RunConfig(max_staleness=ahead))) == []


def test_a_negative_number_of_rollouts_ahead_is_refused() -> None:
    plan = dataclasses.replace(ahead_plan(), run=RunConfig(max_staleness=-1))
    assert refusals(plan) == ["run.max_staleness: got -1, expected 0 or more. The default is 0."]


@pytest.mark.parametrize(("groups", "is_refused"), [(-1, True), (0, False), (3, False), (4, True), (9, True)])
def test_a_streamed_rollout_has_two_pieces_at_least(groups: int, is_refused: bool) -> None:
    plan = make_plan(
        run=RunConfig(reward_overlap_groups=groups), data=DataConfig(train="prompts.txt", prompts_per_step=4)
    )
    assert [reason.key for reason in match(plan).reasons] == ["run.reward_overlap_groups"] * is_refused


@pytest.mark.parametrize(("sampler", "cap"), [("lagged", Cap.LAGGED_POLICY), ("ema", Cap.EMA)])
def test_a_policy_to_sample_from_must_be_kept_by_the_backend(sampler: Any, cap: Cap) -> None:
    algorithm = dataclasses.replace(ALGORITHM, needs=Needs(track="latent", sampler=sampler))
    kept = without(BACKEND, cap, NATIVE)
    assert refusals(make_plan(algorithm=algorithm, backend=kept)) == []
    (result,) = refusals(make_plan(algorithm=algorithm, backend=without(BACKEND, cap, NO)))
    assert result == (
        f"backend: algorithm 'grpo-like', which trains on samples from the {sampler} policy, needs {cap.value!r}; backend "
        f"{BACKEND.name!r} states 'no'."
    )
    scored = dataclasses.replace(ALGORITHM, needs=dataclasses.replace(ALGORITHM.needs, sampler=sampler))
    (result,) = refusals(make_plan(algorithm=scored, backend=kept))
    assert result.startswith(f"algorithm: algorithm 'grpo-like' takes log-probs of samples from the {sampler} policy")


def test_a_lagged_policy_does_not_sample_ahead_with_weights_that_training_shares() -> None:
    needs = Needs(track="latent", sampler="lagged", staleness="any")
    plan = make_plan(
        algorithm=dataclasses.replace(ALGORITHM, needs=needs),
        backend=without(BACKEND, Cap.LAGGED_POLICY, NATIVE),
        engine=without(ENGINE, Cap.WEIGHTS_SHARED, NATIVE),
        run=RunConfig(max_staleness=1),
    )
    (result,) = refusals(plan)
    assert result.startswith("run.max_staleness: got 1; engine 'inside' shares its weights with training")


def test_without_a_need_for_rewards_there_need_be_none() -> None:
    algorithm = dataclasses.replace(ALGORITHM, needs=Needs(track="latent", reward="none"))
    assert refusals(make_plan(algorithm=algorithm, rewards={})) == []
    (result,) = refusals(make_plan(algorithm=algorithm, rewards={}, eval=EvalConfig(threshold=0.5)))
    assert result == "eval.threshold: got 0.5, but the plan has no reward; leave it out, or add a reward."


def test_of_several_tracks_a_reward_scores_those_of_its_medium_and_the_others_have_no_signal() -> None:
    both = {**MODEL.capabilities, Cap.TEXT_STAGE: NATIVE}
    model = dataclasses.replace(MODEL, tracks={"caption": "text", **MODEL.tracks}, capabilities=both)
    engine = dataclasses.replace(ENGINE, capabilities={**ENGINE.capabilities, Cap.TEXT_ROLLOUT: NATIVE})
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
    slope = {**REWARD.capabilities, Cap.REWARD_DIFFERENTIABLE: NATIVE}
    plan = make_plan(
        algorithm=dataclasses.replace(ALGORITHM, needs=Needs(track="latent", reward="differentiable")),
        backend=without(BACKEND, Cap.THROUGH_SAMPLER, NATIVE),
        **{
            "reward.score": dataclasses.replace(REWARD, capabilities=slope),
            "reward.score_config": RewardConfig(weight=0),
        },
    )
    assert any(line.startswith("algorithm: stage 'image' is trained by the gradient") for line in refusals(plan))


def test_batch_invariance_of_an_engine_in_a_process_of_its_own_needs_its_own_mode() -> None:
    apart = dataclasses.replace(ENGINE, environment="toy:ENVIRONMENT")
    on = RunConfig(batch_invariant=True, device="cuda")
    text, latent = ExternalTextConfig(lora_rank=8), ExternalConfig()
    (reason,) = refusals(make_plan(engine=apart, engine_config=latent, run=on))
    assert reason.startswith("run.batch_invariant: got true; engine") and "without a batch-invariant mode" in reason
    assert refusals(make_plan(engine=apart, engine_config=latent)) == []
    assert refusals(make_plan(engine=apart, engine_config=text, run=on)) == []
    (reason,) = refusals(make_plan(engine=apart, engine_config=text, run=dataclasses.replace(on, device="cpu")))
    assert "has its batch-invariant mode only on GPUs" in reason
    # In this process it computes with the torch of the run.
    assert refusals(make_plan(run=dataclasses.replace(on, device="cpu"))) == []


def test_batch_invariance_of_the_run_is_that_of_its_engine() -> None:
    plan = make_plan(engine_config=ExternalTextConfig(), run=RunConfig(batch_invariant=True))
    assert with_batch_invariance(plan).only.engine.config == ExternalTextConfig(batch_invariant=True)
    plan = make_plan(engine_config=ExternalTextConfig(batch_invariant=True))
    assert with_batch_invariance(plan) == plan


def test_a_model_that_needs_media_needs_an_engine_that_takes_them() -> None:
    for use, expected in (("takes", []), ("needs", ["model 'toy', which needs media, needs 'media-refs'"])):
        model = dataclasses.replace(MODEL, inputs={"image": {"source": use}})
        reasons = refusals(make_plan(model=model, engine=without(ENGINE, Cap.MEDIA_REFS)))
        assert [any(text in reason for reason in reasons) for text in expected] == [True] * len(expected), reasons
        assert len(reasons) == len(expected)


def test_what_a_model_says_of_an_engine_replaces_that_it_has_no_bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartConfig, "problems", lambda *_: [Reason(key="engine", text="take another.")])
    assert refusals(make_plan(engine=dataclasses.replace(ENGINE, needs_bridge=True))) == ["engine: take another."]
