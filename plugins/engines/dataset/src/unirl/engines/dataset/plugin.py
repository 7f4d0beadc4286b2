"""Parts that this plugin provides: the engine, and the reward that says which sample of a stored pair is preferred."""

from __future__ import annotations

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import EngineSpec, RewardExample, RewardSpec
from unirl.core.types.data import MediaRef

__all__ = ["PREFERENCE", "SPEC", "unirl_engines", "unirl_rewards"]

SPEC = EngineSpec(
    name="dataset",
    summary="Reads stored images, videos, completions and preference pairs in place of generating samples",
    build="unirl.engines.dataset.engine:build",
    config="unirl.engines.dataset.config:DatasetConfig",
    capabilities={
        Cap.LATENT_ROLLOUT,
        Cap.TEXT_ROLLOUT,
        Cap.SIGMAS,
        Cap.CONDITIONS,
        Cap.MEDIA_REFS,
        Cap.TOKEN_RULES,
        # It encodes with the model that trains, and holds no weights itself.
        Cap.WEIGHTS_SHARED,
    },
    kernels=("euler",),
    samples=(("target",), ("preferred", "rejected")),
)

PREFERENCE = RewardSpec(
    name="preference",
    summary="1 for the preferred sample of a stored pair, 0 for the rejected one",
    build="unirl.engines.dataset.preference:build",
    config="unirl.core.specs.part_config:RewardConfig",
    capabilities={Cap.REWARD_SAMPLE},
    scale="0 or 1, by the roles of the prompt file",
    range=(0.0, 1.0),
    media="any",
    examples=tuple(
        RewardExample(
            prompt=prompt,
            media=tuple(MediaRef(modality="image", role=role, uri=f"{role}.png") for role in SPEC.samples[1]),
        )
        for prompt in ("a cat", "a dog")
    ),
)


@hookimpl
def unirl_engines() -> list[EngineSpec]:
    return [SPEC]


@hookimpl
def unirl_rewards() -> list[RewardSpec]:
    return [PREFERENCE]
