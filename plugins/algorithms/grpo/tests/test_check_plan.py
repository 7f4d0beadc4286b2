"""Reasons to refuse a plan with GRPO or a variant, before anything starts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from plans import one_stage
from unirl.algorithms.grpo.plugin import SPECS
from unirl.core.limits import broken_limits
from unirl.core.plugins.catalog import Catalog
from unirl.core.specs.capability import Cap
from unirl.core.specs.config import AdvantageConfig, TrainConfig
from unirl.core.specs.part_config import BackendConfig, PartConfig
from unirl.core.specs.plan import Choice
from unirl.core.specs.spec import AlgorithmSpec, BackendSpec, EngineSpec, ModelSpec
from unirl.core.types.sampling import TextSamplingConfig

NAMED = {spec.name: spec for spec in SPECS}
README: dict[str, dict[str, Any]] = {
    "dr-grpo": {"advantage.normalize": False, "algorithm.max_length": 64},
    "rloo": {"advantage.leave_one_out": True, "advantage.normalize": False},
    "reinforce-pp": {"advantage.scope": "global", "advantage.center": "global"},
}
"""Settings that the README gives for a name."""


def reasons(name: str, *, log_probs: bool = True, **settings: Any) -> list[str]:
    """Reasons to refuse a plan with completions of 64 tokens and these settings."""
    spec = NAMED[name]
    config = Catalog.discover().resolve(spec.config)
    given = {key: value for key, value in settings.items() if "." not in key}
    for key, value in settings.items():
        section, _, field = key.partition(".")
        if section == "algorithm":
            given[field] = value
    facts: dict[str, Any] = {
        "summary": "a part",
        "build": "unirl:none",
        "config": "unirl.core.specs.part_config:PartConfig",
    }

    def choice(spec: Any, config: PartConfig) -> Any:
        return Choice(key=spec.kind, spec=spec, config=config, dist="none", version="0")

    def section(of: Any, name: str) -> Any:
        return dataclasses.replace(
            of, **{k.partition(".")[2]: v for k, v in settings.items() if k.startswith(f"{name}.")}
        )

    capabilities = {Cap.LOG_PROBS_TOKEN} if log_probs else set[Cap]()
    plan = one_stage(
        model=choice(ModelSpec(name="model", tracks={"text": "text"}, trainable="net", **facts), PartConfig()),
        engine=choice(EngineSpec(name="engine", capabilities=capabilities, **facts), PartConfig()),
        backend=choice(BackendSpec(name="backend", **facts), BackendConfig()),
        algorithm=choice(spec, config(**given)),
        track="text",
        sampling=TextSamplingConfig(max_new_tokens=64),
        advantage=section(AdvantageConfig(), "advantage"),
        train=section(TrainConfig(), "train"),
    )
    algorithm = plan.only.algorithm.config
    result = list(broken_limits(algorithm, key="algorithm"))
    return [str(reason) for reason in result or (one.under("algorithm") for one in algorithm.problems(plan, plan.only))]


@pytest.mark.parametrize("name", NAMED)
def test_each_name_is_accepted_as_its_readme_says(name: str) -> None:
    assert reasons(name, **README.get(name, {})) == []
    assert (
        reasons(
            name, **README.get(name, {}), kl_coef=0.1, kl_target=0.02, tis="token", entropy_coef=0.01, truncated="mask"
        )
        == []
    )


def test_rloo_takes_the_ratio_of_a_token_or_of_a_completion() -> None:
    assert all(not reasons("rloo", **README["rloo"], ratio=ratio) for ratio in ("token", "completion"))


@pytest.mark.parametrize("name", README)
def test_a_name_without_the_advantage_it_stands_for_is_told_what_to_set(name: str) -> None:
    result = " ".join(reasons(name))
    for key, value in README[name].items():
        expected = (
            f"set {key}='${{sampling.max_new_tokens}}'" if "max_length" in key else f"Set {key}={str(value).lower()}"
        )
        assert expected in result


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"loss": "ppo"}, "algorithm.loss: got 'ppo', expected one of clip, cispo. The default is clip."),
        ({"ratio": "text"}, "algorithm.ratio: got 'text'"),
        ({"aggregation": "mean"}, "algorithm.aggregation: got 'mean'"),
        ({"truncated": "drop"}, "algorithm.truncated: got 'drop'"),
        ({"kl_estimator": "k4"}, "algorithm.kl_estimator: got 'k4'"),
        ({"tis": "all"}, "algorithm.tis: got 'all'"),
        ({"clip_range": 1.5}, "algorithm.clip_range: got 1.5, expected more than 0 and at most 1"),
        ({"clip_range_high": 0.0}, "algorithm.clip_range_high: got 0.0"),
        ({"dual_clip": 1.2}, "algorithm.dual_clip: got 1.2, expected more than 1.2, the upper clip"),
        ({"loss": "cispo", "dual_clip": 3.0}, "algorithm.dual_clip: it bounds the clipped loss"),
        ({"loss": "cispo", "ratio": "sequence"}, "algorithm.ratio: loss 'cispo'"),
        ({"loss": "cispo", "ratio": "completion"}, "algorithm.ratio: loss 'cispo'"),
        ({"ratio": "completion"}, "expected algorithm.aggregation=seq-mean-token-sum, as in algorithm=rloo"),
        ({"kl_coef": -0.1}, "algorithm.kl_coef: got -0.1"),
        ({"kl_coef": 0.1, "kl_target": -1.0}, "algorithm.kl_target: got -1.0, expected more than 0, or null."),
        ({"kl_target": 0.1}, "algorithm.kl_target: got 0.1, but a coefficient of 0 stays 0"),
        ({"kl_horizon": 0.0}, "algorithm.kl_horizon: got 0.0, expected more than 0."),
        (
            {"kl_coef": 0.1, "kl_target": 0.1, "kl_horizon": 100.0},
            "algorithm.kl_horizon: got 100, expected at least the 128 samples of one step",
        ),
        ({"entropy_coef": -0.1}, "algorithm.entropy_coef: got -0.1"),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "the gradient of 'k1' is 0 on average"),
        ({"tis_cap": 0.0}, "algorithm.tis_cap: got 0.0"),
        ({"horizon": 5.0}, "algorithm.horizon: got 5.0"),
        ({"aggregation": "seq-mean-token-sum-norm"}, "algorithm.max_length: got 0, but aggregation"),
        ({"overlong_buffer": 8}, "algorithm.max_length: got 0, but algorithm.overlong_buffer needs it"),
        ({"overlong_buffer": 65, "max_length": 64}, "algorithm.overlong_buffer: got 65"),
        ({"overlong_penalty": -1.0}, "algorithm.overlong_penalty: got -1.0"),
        ({"max_length": 32}, "track 'text' has completions of up to 64 tokens"),
        ({"tis": "token", "train.old_log_probs": "engine"}, "so every weight would be 1"),
        ({"tis": "token", "log_probs": False}, "engine 'engine' does not return any"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_in_one_sentence(settings: dict[str, Any], says: str) -> None:
    (reason,) = reasons("grpo", **settings)
    assert says in reason


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_an_algorithm_proposes_the_advantages_that_its_definition_requires(spec: AlgorithmSpec) -> None:
    defined: dict[str, Any] = Catalog.discover().resolve(spec.config).defined_with
    assert spec.proposes == {f"advantage.{key}": value for key, value in defined.items()}
