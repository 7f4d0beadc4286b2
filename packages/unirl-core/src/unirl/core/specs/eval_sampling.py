"""Values of a recipe laid over others: `eval.sampling` over the sampling of training, a stage's own over a section."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from ..types.sampling import SamplingConfig, SdeStepsConfig, TextSamplingConfig

__all__ = ["evaluation_base", "laid_over"]

S = TypeVar("S", bound=SamplingConfig)
T = TypeVar("T")


def evaluation_base(settings: S, given: Collection[str]) -> S:
    """What `eval.sampling` is laid over: latents without noise, by `euler`, and greedy texts.

    given: keys of `eval.sampling`.
    """
    if isinstance(settings, TextSamplingConfig):
        return dataclasses.replace(settings, temperature=0.0)
    # Nothing is stored for training.
    plain: dict[str, Any] = {"trajectory_dtype": "float32", "sde": SdeStepsConfig(mode="none")}
    # Options belong to the kernel, or the guidance, that they were written for.
    kernel: dict[str, Any] = {"kernel": "euler", "eta": 0.0, "kernel_options": {}}
    guidance: dict[str, Any] = {"guidance_options": {}} if "guidance_mode" in given else {}
    return dataclasses.replace(settings, **kernel, **guidance, **plain)


def laid_over(base: T, given: Mapping[str, Any], *, key: str) -> T:
    """The dataclass `base` with the values of `given`, in the types of its fields, nested ones whole.

    key: config path of `given`. Raises OmegaConf's errors, of that path and what is below it, for a key that the
    dataclass does not have and for a value of another type.
    """
    if not given:
        return base
    # Not above: what decides whether parts go together imports this, and must stay light.
    from omegaconf import OmegaConf

    config = OmegaConf.create({})
    OmegaConf.update(config, key, OmegaConf.structured(base))
    OmegaConf.update(config, key, dict(given), merge=True)
    return OmegaConf.to_object(OmegaConf.select(config, key))  # type: ignore[return-value]
