"""Which parts fit together, and the text of each refusal."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from toy_specs import (
    ALGORITHM,
    BACKEND,
    ENGINE,
    MODEL,
    REWARD,
    Algorithm,
    Backend,
    having,
    make_plan,
    refusals,
    without,
)
from unirl.core.limits import Reason
from unirl.core.match.parts import match_parts
from unirl.core.specs.capability import Cap, Needs
from unirl.core.specs.config import RunConfig, TrainConfig
from unirl.core.specs.part_config import PartConfig
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.engine_host.config import ExternalConfig
from unirl.engine_host.text_config import ExternalTextConfig
from unirl.loop.run_plan import with_batch_invariance


def test_parts_that_fit_are_accepted() -> None:
    assert refusals(make_plan()) == []
    assert match_parts(model=MODEL, engine=ENGINE, algorithm=ALGORITHM, backend=BACKEND, rewards={"r": REWARD}).accepted


def test_every_refusal_is_one_sentence_with_its_key() -> None:
    plan = make_plan(engine=without(ENGINE, Cap.SIGMAS))
    assert refusals(plan) == [
        "engine: algorithm 'grpo-like', which trains on trajectories, needs 'sigmas'; engine 'inside' does not provide it."
    ]


@pytest.mark.parametrize("cap", [Cap.LATENT_ROLLOUT, Cap.SIGMAS, Cap.INITIAL_NOISE, Cap.STEP_NOISE, Cap.SDE_STEPS])
def test_an_engine_must_have_what_trajectories_need(cap: Cap) -> None:
    assert len(refusals(make_plan(engine=without(ENGINE, cap)))) == 1


def test_a_full_trajectory_is_a_window_too() -> None:
    engine = having(without(ENGINE, Cap.TRAJECTORY_WINDOW), Cap.TRAJECTORY_FULL)
    assert refusals(make_plan(engine=engine)) == []
    assert len(refusals(make_plan(engine=without(ENGINE, Cap.TRAJECTORY_WINDOW)))) == 1


def test_an_engine_that_can_never_get_the_weights_is_refused() -> None:
    result = refusals(make_plan(engine=without(ENGINE, Cap.WEIGHTS_SHARED)))
    assert len(result) == 1
    assert "always come from the initial policy" in result[0]
    takes_lora = having(without(ENGINE, Cap.WEIGHTS_SHARED), Cap.WEIGHTS_LORA)
    assert refusals(make_plan(engine=takes_lora)) == []
    assert refusals(make_plan(engine=takes_lora, backend_config=Backend(trains="full"))) != []


def test_a_setting_can_raise_a_need() -> None:
    with_kl = {"algorithm_config": Algorithm(kl_coef=0.1)}
    assert refusals(make_plan(**with_kl)) == [], "LoRA: the adapter can be switched off"
    result = refusals(make_plan(**with_kl, backend_config=Backend(trains="full")))
    assert result == [
        "backend: algorithm 'grpo-like' with a KL penalty to the reference policy needs 'reference-copy'; "
        "backend 'plain' does not provide it."
    ]


def test_a_text_algorithm_is_refused_on_a_latent_model() -> None:
    text = dataclasses.replace(ALGORITHM, needs=Needs(track="text"))
    assert any("trains text tracks" in line for line in refusals(make_plan(algorithm=text)))


def test_an_algorithm_with_a_critic_needs_a_backend_that_keeps_one_for_either_kind_of_track() -> None:
    judged = dataclasses.replace(ALGORITHM, name="ppo-like", needs=Needs(track="text", critic=True), when={})
    model = dataclasses.replace(MODEL, tracks={"text": "text"}, capabilities={Cap.TEXT_STAGE, Cap.LORA})
    engine = having(ENGINE, Cap.TEXT_ROLLOUT, Cap.LOG_PROBS_TOKEN)
    keeps = having(BACKEND, Cap.CRITIC)

    def reasons(**parts: Any) -> list[str]:
        chosen = {"model": model, "engine": engine, "algorithm": judged, "backend": keeps, "rewards": {}, **parts}
        return [str(reason) for reason in match_parts(**chosen).reasons]

    assert reasons() == []
    assert reasons(backend=BACKEND) == [
        "backend: algorithm 'ppo-like' needs 'critic'; backend 'plain' does not provide it."
    ]
    on_latents = dataclasses.replace(
        ALGORITHM, name="ppo-like", needs=dataclasses.replace(ALGORITHM.needs, critic=True)
    )
    assert reasons(model=MODEL, engine=ENGINE, algorithm=on_latents) == []
    detached = make_plan(
        algorithm=on_latents, backend=having(BACKEND, Cap.CRITIC), train=TrainConfig(old_log_probs="detached")
    )
    assert refusals(detached) == [
        "train.old_log_probs: got 'detached', but returns of algorithm 'ppo-like' are computed before the first update, "
        "and may depend on old log-probs. Use auto, replay or engine."
    ]
    assert reasons(model=MODEL, engine=ENGINE, algorithm=on_latents, backend=without(BACKEND, Cap.CRITIC)) == [
        "backend: algorithm 'ppo-like' needs 'critic'; backend 'plain' does not provide it."
    ]


def test_parts_fit_when_one_way_of_training_does() -> None:
    kl = dataclasses.replace(ALGORITHM, needs=dataclasses.replace(ALGORITHM.needs, reference="policy"))
    lora_only = dataclasses.replace(BACKEND, capabilities={Cap.TRAIN_LORA, Cap.REFERENCE_ADAPTER_OFF})

    def found(**parts: Any) -> list[str]:
        return [
            str(reason)
            for reason in match_parts(**{"model": MODEL, "engine": ENGINE, "algorithm": kl, **parts}).reasons
        ]

    assert found(backend=lora_only) == []
    assert found(model=without(MODEL, Cap.LORA), backend=lora_only) == [
        "model: training LoRA adapters needs 'lora'; model 'toy' does not provide it."
    ]


def test_guidance_needs_both_the_engine_and_the_model() -> None:
    sampling = LatentSamplingConfig(guidance_scale=4.5)
    assert refusals(make_plan(sampling=sampling)) == []
    assert len(refusals(make_plan(sampling=sampling, engine=without(ENGINE, Cap.GUIDANCE)))) == 1
    assert len(refusals(make_plan(sampling=sampling, model=without(MODEL, Cap.GUIDANCE)))) == 1


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
