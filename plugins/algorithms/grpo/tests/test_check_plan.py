"""What a plan with GRPO or a relative is refused for, before anything starts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from unirl.algorithms.grpo.plugin import SPECS, unirl_check_plan
from unirl.core.capability import Cap, Support
from unirl.core.catalog import Catalog
from unirl.core.config import (
    AdvantageConfig,
    BackendConfig,
    DataConfig,
    EvalConfig,
    PartConfig,
    RunConfig,
    TextSamplingConfig,
    TrainConfig,
)
from unirl.core.plan import Choice, Plan
from unirl.core.spec import BackendSpec, EngineSpec, ModelSpec

NAMED = {spec.name: spec for spec in SPECS}
README: dict[str, dict[str, Any]] = {
    "dr-grpo": {"advantage.normalize": False, "algorithm.max_length": 64},
    "rloo": {"advantage.leave_one_out": True, "advantage.normalize": False},
    "reinforce-pp": {"advantage.scope": "global", "advantage.center": "global"},
}
"""What the README says to set along with a name."""


def reasons(name: str, *, log_probs: Support = Support.NATIVE, **settings: Any) -> list[str]:
    """Of a plan with texts of 64 tokens and these settings."""
    spec = NAMED[name]
    config = Catalog.discover().resolve(spec.config)
    given = {key: value for key, value in settings.items() if "." not in key}
    for key, value in settings.items():
        section, _, field = key.partition(".")
        if section == "algorithm":
            given[field] = value
    facts: dict[str, Any] = {"summary": "a part", "build": "unirl:none", "config": "unirl.core.config:PartConfig"}

    def choice(spec: Any, config: PartConfig) -> Any:
        return Choice(key=spec.kind, spec=spec, config=config, dist="none", version="0")

    def section(of: Any, name: str) -> Any:
        return dataclasses.replace(
            of, **{k.partition(".")[2]: v for k, v in settings.items() if k.startswith(f"{name}.")}
        )

    plan = Plan(
        recipe="test",
        model=choice(ModelSpec(name="model", tracks={"text": "text"}, trainable="net", **facts), PartConfig()),
        engine=choice(EngineSpec(name="engine", capabilities={Cap.LOG_PROBS_TOKEN: log_probs}, **facts), PartConfig()),
        backend=choice(BackendSpec(name="backend", **facts), BackendConfig()),
        algorithm=choice(spec, config(**given)),
        rewards={},
        trackers={},
        sampling={"text": TextSamplingConfig(max_new_tokens=64)},
        run=RunConfig(),
        data=DataConfig(),
        advantage=section(AdvantageConfig(), "advantage"),
        train=section(TrainConfig(), "train"),
        eval=EvalConfig(),
        resolved={},
        origins={},
        hash="",
    )
    return list(unirl_check_plan(plan))


@pytest.mark.parametrize("name", NAMED)
def test_each_name_is_accepted_as_its_readme_says(name: str) -> None:
    assert reasons(name, **README.get(name, {})) == []
    assert (
        reasons(
            name, **README.get(name, {}), kl_coef=0.1, kl_target=0.02, tis="token", entropy_coef=0.01, truncated="mask"
        )
        == []
    )


@pytest.mark.parametrize("name", README)
def test_a_name_without_the_advantage_it_stands_for_is_told_what_to_set(name: str) -> None:
    found = " ".join(reasons(name))
    for key, value in README[name].items():
        wanted = (
            f"set {key}='${{sampling.max_new_tokens}}'" if "max_length" in key else f"Set {key}={str(value).lower()}"
        )
        assert wanted in found


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"loss": "ppo"}, "algorithm.loss: 'ppo' was asked for; it is one of clip, cispo."),
        ({"ratio": "text"}, "algorithm.ratio: 'text'"),
        ({"aggregation": "mean"}, "algorithm.aggregation: 'mean'"),
        ({"truncated": "drop"}, "algorithm.truncated: 'drop'"),
        ({"kl_estimator": "k4"}, "algorithm.kl_estimator: 'k4'"),
        ({"tis": "all"}, "algorithm.tis: 'all'"),
        ({"clip_range": 1.0}, "algorithm.clip_range: 1.0 was asked for; it must lie between 0 and 1."),
        ({"clip_range_high": 0.0}, "algorithm.clip_range_high: 0.0"),
        ({"dual_clip": 1.2}, "algorithm.dual_clip: 1.2 was asked for; it must be above the upper clip, 1.2"),
        ({"loss": "cispo", "dual_clip": 3.0}, "algorithm.dual_clip: it bounds the clipped loss"),
        ({"loss": "cispo", "ratio": "sequence"}, "algorithm.ratio: loss 'cispo'"),
        ({"kl_coef": -0.1}, "algorithm.kl_coef: -0.1"),
        ({"kl_coef": 0.1, "kl_target": -1.0}, "algorithm.kl_target: -1.0 was asked for; it must be above 0, or null"),
        ({"kl_target": 0.1}, "algorithm.kl_target: 0.1 was asked for, and a coefficient of 0 stays 0"),
        ({"kl_horizon": 0.0}, "algorithm.kl_horizon: 0.0 was asked for; it must be above 0."),
        (
            {"kl_coef": 0.1, "kl_target": 0.1, "kl_horizon": 100.0},
            "algorithm.kl_horizon: 100 was asked for, fewer than the 128 samples of one step",
        ),
        ({"entropy_coef": -0.1}, "algorithm.entropy_coef: -0.1"),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "the gradient of 'k1' is 0 on average"),
        ({"tis_cap": 0.0}, "algorithm.tis_cap: 0.0"),
        ({"horizon": 5.0}, "algorithm.horizon: 5.0"),
        ({"aggregation": "seq-mean-token-sum-norm"}, "algorithm.max_length: aggregation 'seq-mean-token-sum-norm'"),
        ({"overlong_buffer": 8}, "algorithm.max_length: algorithm.overlong_buffer needs it, found 0"),
        ({"overlong_buffer": 65, "max_length": 64}, "algorithm.overlong_buffer: 65"),
        ({"overlong_penalty": -1.0}, "algorithm.overlong_penalty: -1.0"),
        ({"max_length": 32}, "track 'text' has texts of up to 64 tokens"),
        ({"tis": "token", "train.old_log_probs": "engine"}, "so every weight would be 1"),
        ({"tis": "token", "log_probs": Support.NO}, "engine 'engine' gives none of tokens"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_in_one_sentence(settings: dict[str, Any], says: str) -> None:
    (reason,) = reasons("grpo", **settings)
    assert says in reason
