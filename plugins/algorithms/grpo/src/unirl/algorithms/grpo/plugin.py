"""What this plugin provides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from unirl.core.capability import Needs
from unirl.core.hookspec import hookimpl
from unirl.core.kl import kl_reasons
from unirl.core.plan import Plan
from unirl.core.spec import AlgorithmSpec
from unirl.core.token_policy import clip_reasons, token_policy_reasons

if TYPE_CHECKING:
    from unirl.algorithms.grpo.config import GrpoConfig


def _spec(
    name: str, summary: str, *, config: str, paper: str, clip_key: str = "clip_range", **trial: Any
) -> AlgorithmSpec:
    return AlgorithmSpec(
        name=name,
        summary=summary,
        build="unirl.algorithms.grpo.algorithm:build",
        config=f"unirl.algorithms.grpo.config:{config}",
        needs=Needs(track="text", log_probs="token", staleness="ratio"),
        when={"kl_coef": Needs(reference="policy")},
        stateful={"kl_coef": 0.1, "kl_target": 0.01, "kl_horizon": 100.0},
        clip_key=clip_key,
        paper=paper,
        reference="unirl.algorithms.grpo.reference:loss",
        trial=trial,
    )


SPECS = (
    _spec(
        "grpo",
        "Clipped policy gradient over tokens, with advantages inside the group of a prompt",
        config="GrpoConfig",
        paper="arXiv 2402.03300",
    ),
    _spec(
        "dr-grpo",
        "GRPO without its biases: no standard deviation, and a constant in place of the length",
        config="DrGrpoConfig",
        paper="arXiv 2503.20783",
        max_length=16,
    ),
    _spec(
        "dapo",
        "GRPO with a wider upper clip, tokens that weigh alike, and groups without signal left out",
        config="DapoConfig",
        paper="arXiv 2503.14476",
    ),
    _spec(
        "gspo",
        "GRPO with one ratio for the whole of a text",
        config="GspoConfig",
        paper="arXiv 2507.18071",
        # A clip of the mean over a text bounds nothing of a single token.
        clip_key="",
        clip_range=0.05,
        clip_range_high=0.05,
    ),
    _spec(
        "cispo",
        "Policy gradient with clipped importance weights, in which every token keeps its gradient",
        config="CispoConfig",
        paper="arXiv 2506.13585",
    ),
    _spec(
        "rloo",
        "REINFORCE of whole texts, each compared with the mean of the others of its group",
        config="RlooConfig",
        paper="arXiv 2402.14740",
    ),
    _spec(
        "reinforce-pp",
        "REINFORCE++: clipped policy gradient over tokens, advantages whitened over the batch",
        config="ReinforcePpConfig",
        paper="arXiv 2501.03262",
    ),
)
ADVANTAGE: Mapping[str, Mapping[str, Any]] = {
    "dr-grpo": {"normalize": False},
    "rloo": {"leave_one_out": True, "normalize": False, "center": "group"},
    "reinforce-pp": {"normalize": True, "scope": "global", "center": "global"},
}
"""Settings of `advantage` without which an algorithm is not what its name says."""


@hookimpl
def unirl_algorithms() -> Iterable[AlgorithmSpec]:
    return SPECS


@hookimpl
def unirl_check_plan(plan: Plan) -> Iterable[str]:
    """The settings that only these algorithms have, and those of `advantage` that their names stand for."""
    if not any(plan.algorithm.spec is spec for spec in SPECS):
        return []
    from unirl.algorithms.grpo.config import GrpoConfig

    config = plan.algorithm.config
    assert isinstance(config, GrpoConfig)
    return [
        *_advantage(plan),
        *_names(config),
        *_ranges(config),
        *kl_reasons(config, plan),
        *token_policy_reasons(config, plan),
        *_lengths(config, plan),
    ]


def _advantage(plan: Plan) -> Iterator[str]:
    name = plan.algorithm.spec.name
    for key, wanted in ADVANTAGE.get(name, {}).items():
        found = getattr(plan.advantage, key)
        if found != wanted:
            yield (
                f"advantage.{key}: {_yaml(found)} was asked for, and {name} is defined with {_yaml(wanted)}. Set "
                f"advantage.{key}={_yaml(wanted)}, or use algorithm=grpo, which takes any advantage."
            )


def _names(config: GrpoConfig) -> Iterator[str]:
    for key, value, known in (
        ("loss", config.loss, ("clip", "cispo")),
        ("ratio", config.ratio, ("token", "sequence")),
        (
            "aggregation",
            config.aggregation,
            ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"),
        ),
    ):
        if value not in known:
            yield f"algorithm.{key}: {value!r} was asked for; it is one of {', '.join(known)}."


def _ranges(config: GrpoConfig) -> Iterator[str]:
    if config.loss != "cispo":
        yield from clip_reasons(config)
        return
    if not 0 < config.clip_range <= 1:
        yield f"algorithm.clip_range: {config.clip_range} was asked for; it must be above 0 and at most 1."
    if config.dual_clip is not None:
        yield "algorithm.dual_clip: it bounds the clipped loss; loss 'cispo' has its own bound. Set it to null."
    if config.ratio == "sequence":
        yield "algorithm.ratio: loss 'cispo' weighs each token by its own ratio; use 'token', or loss 'clip'."


def _lengths(config: GrpoConfig, plan: Plan) -> Iterator[str]:
    from unirl.core.config import TextSamplingConfig

    has_constant = config.aggregation == "seq-mean-token-sum-norm"
    if config.horizon is not None and (not has_constant or config.horizon <= 0):
        yield (
            f"algorithm.horizon: {config.horizon} was asked for; it is above 0, and null unless algorithm.aggregation "
            "is seq-mean-token-sum-norm."
        )
    if config.overlong_penalty < 0:
        yield f"algorithm.overlong_penalty: {config.overlong_penalty} was asked for; it must be 0 or more."
    if config.overlong_buffer < 0 or (config.overlong_buffer > config.max_length > 0):
        yield (
            f"algorithm.overlong_buffer: {config.overlong_buffer} was asked for; it must lie between 0 and "
            f"algorithm.max_length, {config.max_length}."
        )
    needs = ["algorithm.overlong_buffer"] if config.overlong_buffer else []
    needs += (
        [f"aggregation {config.aggregation!r} without a horizon"] if has_constant and config.horizon is None else []
    )
    if needs and config.max_length <= 0:
        yield (
            f"algorithm.max_length: {' and '.join(needs)} needs it, found {config.max_length}; set "
            "algorithm.max_length='${sampling.max_new_tokens}'."
        )
    for name, sampling in plan.sampling.items():
        if isinstance(sampling, TextSamplingConfig) and config.max_length not in (0, sampling.max_new_tokens):
            yield (
                f"algorithm.max_length: {config.max_length} was asked for; track {name!r} has texts of up to "
                f"{sampling.max_new_tokens} tokens. Set algorithm.max_length='${{sampling.max_new_tokens}}'."
            )


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
