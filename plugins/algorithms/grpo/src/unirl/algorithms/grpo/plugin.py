"""Parts that this plugin provides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Needs
from unirl.core.specs.spec import AlgorithmSpec


def _spec(
    name: str,
    summary: str,
    *,
    config: str,
    paper: str,
    clip_key: str = "clip_range",
    advantage: Mapping[str, Any] | None = None,
    **trial: Any,
) -> AlgorithmSpec:
    """advantage: settings of the section that its definition requires."""
    return AlgorithmSpec(
        name=name,
        summary=summary,
        build="unirl.algorithms.grpo.algorithm:build",
        config=f"unirl.algorithms.grpo.config:{config}",
        needs=Needs(track="text", log_probs="token", staleness="ratio"),
        when={"kl_coef": Needs(reference="policy")},
        stateful={"kl_coef": 0.1, "kl_target": 0.01, "kl_horizon": 100.0},
        clip_key=clip_key,
        correction_key="tis",
        proposes={f"advantage.{key}": value for key, value in (advantage or {}).items()},
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
        advantage={"normalize": False},
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
        advantage={"leave_one_out": True, "normalize": False, "center": "group"},
        paper="arXiv 2402.14740",
    ),
    _spec(
        "reinforce-pp",
        "REINFORCE++: clipped policy gradient over tokens, advantages whitened over the batch",
        config="ReinforcePpConfig",
        advantage={"normalize": True, "scope": "global", "center": "global"},
        paper="arXiv 2501.03262",
    ),
)


@hookimpl
def unirl_algorithms() -> Iterable[AlgorithmSpec]:
    return SPECS
