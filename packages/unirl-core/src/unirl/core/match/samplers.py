"""Whether the kernel and the guidance of latent sampling can be had: short names from the engine's spec, and classes of
plugins, which are imported only where a recipe names them or their options."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..limits import Reason
from ..names import did_you_mean
from ..specs.capability import Cap, Support
from ..types.sampling import PLAIN_GUIDANCE

if TYPE_CHECKING:
    from ..plugins.catalog import Catalog
    from ..specs.spec import EngineSpec
    from ..types.sampling import LatentSamplingConfig

__all__ = ["noiseless", "sampler_problems"]

NUMERICS = "unirl.numerics.diffusion.sampler_check"
"""Makes kernels and guidances. It imports torch, so only settings beyond short names are checked with it."""


def sampler_problems(
    key: str, sampling: LatentSamplingConfig, engine: EngineSpec, *, catalog: Catalog | None
) -> Iterator[Reason]:
    """Reasons against `kernel` and `guidance_mode` of the settings at `key`, and against their options."""
    kernels = (engine.kernels, catalog.offered("kernels") if catalog is not None else None)
    guidances = (engine.guidances, catalog.offered("guidances") if catalog is not None else None)
    reasons: list[Reason] = []
    for name, value, (short, offered) in (
        ("kernel", sampling.kernel, kernels),
        ("guidance_mode", sampling.guidance_mode, guidances),
    ):
        others = sorted(offered or ()) if engine.support(Cap.PLUGIN_SAMPLERS) is Support.NATIVE else []
        available = ", ".join([*sorted(short), *others]) or "nothing"
        if ":" not in value and value not in short:
            text = f"got {value!r}; engine {engine.name!r} supports {available}{did_you_mean(value, short) or '.'}"
            reasons.append(Reason(key=f"{key}.{name}", text=text))
        elif ":" in value and engine.support(Cap.PLUGIN_SAMPLERS) is not Support.NATIVE:
            text = f"got {value!r}; engine {engine.name!r} computes none of plugins. It supports {available}."
            reasons.append(Reason(key=f"{key}.{name}", text=text))
        elif ":" in value and offered is not None and value not in offered:
            text = f"got {value!r}, which no loaded plugin offers. Available: {available}"
            reasons.append(Reason(key=f"{key}.{name}", text=f"{text}{did_you_mean(value, offered) or '.'}"))
    yield from reasons
    if not reasons and _needs_classes(sampling):
        yield from (reason.under(key) for reason in _numerics().sampler_problems(sampling))


def noiseless(sampling: LatentSamplingConfig) -> str:
    """Why a plugin's kernel has no stochastic step with these settings; empty where it has, and for short names."""
    if ":" not in sampling.kernel or _numerics().is_stochastic(sampling):
        return ""
    return f"{sampling.kernel!r} is deterministic with eta {sampling.eta} and these options."


def _needs_classes(sampling: LatentSamplingConfig) -> bool:
    is_plain = ":" not in sampling.kernel and sampling.guidance_mode in PLAIN_GUIDANCE
    return not is_plain or bool(sampling.kernel_options or sampling.guidance_options)


def _numerics() -> Any:
    return import_module(NUMERICS)
