"""What fits together, and what the refusal says."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
from unirl.core.capability import Cap, Needs, Support
from unirl.core.config import (
    AdvantageConfig,
    BackendConfig,
    DataConfig,
    EvalConfig,
    LatentSamplingConfig,
    PartConfig,
    RewardConfig,
    RunConfig,
    SdeStepsConfig,
    TrainConfig,
)
from unirl.core.match import match, match_pair, match_parts
from unirl.core.plan import Choice, Plan
from unirl.core.spec import AlgorithmSpec, BackendSpec, EngineSpec, LauncherSpec, ModelSpec, RewardSpec

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

    plan = Plan(
        recipe="toy",
        model=choice("model", MODEL, PartConfig()),
        engine=choice("engine", ENGINE, PartConfig()),
        backend=choice("backend", BACKEND, Backend()),
        algorithm=choice("algorithm", ALGORITHM, Algorithm()),
        rewards={"score": choice("reward.score", REWARD, RewardConfig())},
        trackers={},
        sampling={"image": LatentSamplingConfig()},
        run=RunConfig(),
        data=DataConfig(train="prompts.txt"),
        advantage=AdvantageConfig(),
        train=TrainConfig(),
        eval=EvalConfig(),
        resolved={},
        origins={},
        hash="",
    )
    return dataclasses.replace(plan, **changes)


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


def test_an_engine_refuses_the_models_that_it_names_with_its_reason() -> None:
    particular = dataclasses.replace(ENGINE, refuses={"toy": "it has no room for toys"})
    (reason,) = match_pair(model=MODEL, engine=particular).reasons
    assert reason.key == "engine"
    assert reason.text.startswith("engine 'inside' does not run model 'toy', because it has no room for toys.")
    assert match_pair(model=dataclasses.replace(MODEL, name="other"), engine=particular).accepted


def test_what_a_spec_does_not_state_is_refused_and_named_so() -> None:
    capabilities = {cap: support for cap, support in ENGINE.capabilities.items() if cap is not Cap.STEP_NOISE}
    found = refusals(make_plan(engine=dataclasses.replace(ENGINE, capabilities=capabilities)))
    assert found == [
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
    found = refusals(make_plan(engine=without(ENGINE, Cap.WEIGHTS_SHARED)))
    assert len(found) == 1
    assert "initial policy for ever" in found[0]
    takes_lora = without(without(ENGINE, Cap.WEIGHTS_SHARED), Cap.WEIGHTS_LORA, NATIVE)
    assert refusals(make_plan(engine=takes_lora)) == []
    assert refusals(make_plan(engine=takes_lora, backend_config=Backend(trains="full"))) != []


def test_a_setting_can_raise_a_need() -> None:
    with_kl = {"algorithm_config": Algorithm(kl_coef=0.1)}
    assert refusals(make_plan(**with_kl)) == [], "LoRA: the adapter can be switched off"
    found = refusals(make_plan(**with_kl, backend_config=Backend(trains="full")))
    assert found == [
        "backend: algorithm 'grpo-like' with a KL to the reference policy needs 'reference-copy'; "
        "backend 'plain' does not state it."
    ]


def test_a_text_algorithm_is_refused_on_a_latent_model() -> None:
    text = dataclasses.replace(ALGORITHM, needs=Needs(track="text"))
    assert any("trains text tracks" in line for line in refusals(make_plan(algorithm=text)))


def test_an_algorithm_with_a_critic_needs_tokens_and_a_backend_that_keeps_one() -> None:
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
    assert reasons(model=MODEL, engine=ENGINE, algorithm=on_latents) == [
        "algorithm: algorithm 'ppo-like' trains a critic, which reads tokens; model 'toy' has no text track. "
        "Choose one that has."
    ]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"eta": 0.0}, "sampling.eta: algorithm 'grpo-like' takes ratios"),
        ({"kernel": "euler"}, "sampling.kernel: algorithm 'grpo-like' takes ratios"),
        (
            {"kernel": "dance-sde"},
            "sampling.kernel: 'dance-sde' was asked for; engine 'inside' runs cps, euler, flow-sde.",
        ),
        ({"steps": 0}, "sampling.steps: 0 was asked for"),
        ({"guidance_mode": "double"}, "sampling.guidance_mode: 'double' is not one of"),
        (
            {"sde": SdeStepsConfig(mode="fixed", steps=[3, 20])},
            "sampling.sde.steps: step 20 is past the last step 9 (sampling.steps = 10). Steps count from 0.",
        ),
        (
            {"sde": SdeStepsConfig(mode="random", count=6, last=0.5)},
            "sampling.sde.count: 6 steps were asked for; the pool has 5",
        ),
        ({"sde": SdeStepsConfig(mode="window", window=11)}, "sampling.sde.window: a window of 11 steps"),
        ({"sde": SdeStepsConfig(mode="window", window=2, overlap=2)}, "sampling.sde.overlap: 2 was asked for"),
        ({"sde": SdeStepsConfig(mode="none")}, "sampling.sde.mode: algorithm 'grpo-like' takes ratios"),
        ({"sde": SdeStepsConfig(mode="some")}, "sampling.sde.mode: 'some' is not one of"),
        (
            {"sde": SdeStepsConfig(mode="fraction", first=0.5, last=0.5)},
            "sampling.sde.first: the pool goes from 0.5 to 0.5",
        ),
        (
            {"sde": SdeStepsConfig(mode="fraction", first=0.01, last=0.05)},
            "sampling.sde.last: from 0.01 to 0.05 of 10 steps",
        ),
        ({"sde": SdeStepsConfig(mode="random", count=1, per_group=True)}, "engine: sampling.sde.per_group needs"),
    ],
)
def test_sampling_that_cannot_work_is_refused(changes: dict[str, Any], says: str) -> None:
    found = refusals(make_plan(sampling={"image": LatentSamplingConfig(**changes)}))
    assert len(found) >= 1
    assert any(line.startswith(says) for line in found), found


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"guidance_mode": "double"}, "eval.sampling.guidance_mode: 'double' is not one of"),
        ({"steps": 0}, "eval.sampling.steps: 0 was asked for; it must be 1 or more."),
        ({"kernel": "dance-sde"}, "eval.sampling.kernel: 'dance-sde' was asked for; engine 'inside' runs"),
    ],
)
def test_evaluation_is_held_to_what_training_is(changed: dict[str, Any], says: str) -> None:
    (found,) = refusals(make_plan(eval=EvalConfig(sampling=changed)))
    assert found.startswith(says)


def test_what_evaluation_takes_over_from_training_is_refused_once() -> None:
    (found,) = refusals(make_plan(sampling={"image": LatentSamplingConfig(guidance_mode="double")}))
    assert found.startswith("sampling.guidance_mode: ")


def test_guidance_of_evaluation_alone_is_asked_of_the_engine() -> None:
    wanted = EvalConfig(sampling={"guidance_scale": 4.5})
    assert refusals(make_plan(eval=wanted)) == []
    (found,) = refusals(make_plan(eval=wanted, engine=without(ENGINE, Cap.GUIDANCE)))
    assert found.startswith("engine: guidance_scale 4.5 needs")


@pytest.mark.parametrize(
    ("section", "changes", "says"),
    [
        ("data", {"prompts_per_step": 0}, "data.prompts_per_step: 0 was asked for; it must be 1 or more."),
        ("data", {"samples_per_prompt": 1}, "data.samples_per_prompt: a group of 1 has no spread"),
        ("train", {"updates_per_step": 500}, "train.updates_per_step: 500 updates cannot be made of 128 samples"),
        ("train", {"micro_batch": -1}, "train.micro_batch: -1 was asked for; it must be 0 or more."),
        ("train", {"replay": "both"}, "train.replay: 'both' was asked for; it is one of serial, stacked."),
        ("train", {"old_log_probs": "engine"}, "engine: train.old_log_probs=engine needs 'log-probs-gaussian'"),
        ("advantage", {"scope": "row"}, "advantage.scope: 'row' was asked for; it is one of global, group."),
        ("advantage", {"ddof": 2}, "advantage.ddof: 2 was asked for; it is one of 0, 1."),
    ],
)
def test_geometry_and_closed_sets_are_checked(section: str, changes: dict[str, Any], says: str) -> None:
    plan = make_plan()
    plan = dataclasses.replace(plan, **{section: dataclasses.replace(getattr(plan, section), **changes)})
    assert any(line.startswith(says) for line in refusals(plan)), refusals(plan)


def test_an_algorithm_of_one_update_refuses_more() -> None:
    once = dataclasses.replace(ALGORITHM, needs=dataclasses.replace(ALGORITHM.needs, multi_update=False))
    assert refusals(make_plan(algorithm=once)) == []
    assert len(refusals(make_plan(algorithm=once, train=TrainConfig(updates_per_step=2)))) == 1


def test_rewards_must_exist_weigh_something_and_score_what_is_made() -> None:
    assert any("no reward was chosen" in line for line in refusals(make_plan(rewards={})))
    zero = make_plan(**{"reward.score_config": RewardConfig(weight=0.0)})
    assert any("weight 0" in line for line in refusals(zero))
    video = make_plan(**{"reward.score": dataclasses.replace(REWARD, media="video")})
    assert refusals(video) == ["reward.score: reward 'score' scores video; model 'toy' gives image here."]
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


def test_guidance_needs_both_the_engine_and_the_model() -> None:
    sampling = {"image": LatentSamplingConfig(guidance_scale=4.5)}
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
    return make_plan(run=RunConfig(rollout_ahead=1), train=TrainConfig(old_log_probs=old_log_probs), **changes)


def launched(placement: str, separates: dict[str, Any] | None) -> Any:
    spec = LauncherSpec(name="cluster", separates=separates, **PARTS)
    return Choice(key="launcher", spec=spec, config=Placed(placement=placement), dist="toy", version="1")


def test_rollouts_ahead_need_an_algorithm_that_states_that_it_can_use_them() -> None:
    assert refusals(ahead_plan()) == []
    for staleness, says in (("unstated", "does not state that it can"), ("none", "cannot with these settings")):
        (found,) = refusals(ahead_plan(staleness=staleness))
        assert found == (
            "run.rollout_ahead: 1 was asked for, which trains on samples of older weights; algorithm 'grpo-like' "
            f"{says}. Use 0."
        )


def test_a_setting_of_the_algorithm_can_take_it_back() -> None:
    plan = ahead_plan()
    strict = dataclasses.replace(plan.algorithm.spec, when={"kl_coef": Needs(staleness="none")})
    plan = dataclasses.replace(plan, algorithm=dataclasses.replace(plan.algorithm, spec=strict))
    assert refusals(plan) == []
    plan.algorithm.config.kl_coef = 0.1  # type: ignore[attr-defined]
    assert len(refusals(plan)) == 1


def test_a_ratio_corrects_for_staleness_with_the_engines_log_probs_alone() -> None:
    assert refusals(ahead_plan(staleness="ratio", old_log_probs="engine")) == []
    (found,) = refusals(ahead_plan(staleness="ratio"))
    assert found.startswith(
        "train.old_log_probs: under run.rollout_ahead=1, algorithm 'grpo-like' corrects for the age"
    )
    assert found.endswith("Set train.old_log_probs=engine.")


@pytest.mark.parametrize("launcher", [None, launched("trainside", None)])
def test_rollouts_ahead_need_weights_that_training_does_not_change(launcher: Any) -> None:
    assert refusals(ahead_plan(launcher=launcher)) == []
    (found,) = refusals(ahead_plan(engine=ENGINE, launcher=launcher))
    assert found.startswith("run.rollout_ahead: 1 was asked for; engine 'inside' samples from the very weights")


@pytest.mark.parametrize("engine", [ENGINE, OWN_WEIGHTS])
def test_workers_that_train_and_generate_cannot_do_both_at_once(engine: EngineSpec) -> None:
    separates = {"placement": "separate"}
    assert refusals(ahead_plan(engine=engine, launcher=launched("separate", separates))) == []
    (found,) = refusals(ahead_plan(engine=engine, launcher=launched("trainside", separates)))
    assert found == (
        "launcher.placement: under run.rollout_ahead=1 rollouts are made while training runs; with 'trainside' the same "
        "workers do both. Set launcher.placement=separate."
    )


@pytest.mark.parametrize("ahead", [2, 3, 1000])
def test_any_number_of_rollouts_may_be_ahead(ahead: int) -> None:
    assert refusals(dataclasses.replace(ahead_plan(), run=RunConfig(rollout_ahead=ahead))) == []


def test_a_negative_number_of_rollouts_ahead_is_refused() -> None:
    plan = dataclasses.replace(ahead_plan(), run=RunConfig(rollout_ahead=-1))
    assert refusals(plan) == ["run.rollout_ahead: -1 was asked for; it must be 0 or more."]


@pytest.mark.parametrize(("groups", "is_refused"), [(-1, True), (0, False), (3, False), (4, True), (9, True)])
def test_a_streamed_rollout_has_two_pieces_at_least(groups: int, is_refused: bool) -> None:
    plan = make_plan(run=RunConfig(stream_groups=groups), data=DataConfig(train="prompts.txt", prompts_per_step=4))
    assert [reason.key for reason in match(plan).reasons] == ["run.stream_groups"] * is_refused
