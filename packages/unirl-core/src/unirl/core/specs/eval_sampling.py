"""What evaluation samples with: the sampling of training, with `eval.sampling` laid over it and nothing to train on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from ..types.sampling import SamplingConfig, SdeStepsConfig, TextSamplingConfig

__all__ = ["evaluation_base", "typed_evaluation"]

S = TypeVar("S", bound=SamplingConfig)


def evaluation_base(settings: S) -> S:
    """What `eval.sampling` is laid over: latents without noise, by `euler`, and greedy texts."""
    if isinstance(settings, TextSamplingConfig):
        return dataclasses.replace(settings, temperature=0.0)
    # Options belong to the kernel that they were written for.
    kernel: dict[str, Any] = {"kernel": "euler", "eta": 0.0, "kernel_options": {}}
    return dataclasses.replace(settings, **kernel, sde=SdeStepsConfig(mode="none"))


def typed_evaluation(given: Mapping[str, Any], tracks: Iterable[SamplingConfig]) -> dict[str, Any]:
    """The values of `eval.sampling` in the types of what they are laid over, nested ones whole.

    tracks: the sampling of each track in training. Raises OmegaConf's errors, of `eval.sampling` and what is below it,
    for a key that one of them does not have and for a value that is of another type.
    """
    # Not above: what decides whether parts go together imports this, and must stay light.
    from omegaconf import OmegaConf

    typed: dict[str, Any] = {}
    for settings in tracks:
        config = OmegaConf.create({"eval": {"sampling": OmegaConf.structured(evaluation_base(settings))}})
        OmegaConf.update(config, "eval.sampling", dict(given), merge=True)
        laid = OmegaConf.to_object(config.eval.sampling)
        typed |= {key: getattr(laid, key) for key in given}
    return typed
