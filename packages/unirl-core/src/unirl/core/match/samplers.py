"""Whether the kernel and the guidance of latent sampling are available: short names from the engine's spec, and classes
that plugins offer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..limits import Reason
from ..names import did_you_mean
from ..specs.capability import Cap

if TYPE_CHECKING:
    from ..plugins.catalog import Catalog
    from ..specs.spec import EngineSpec
    from ..types.sampling import LatentSamplingConfig

__all__ = ["sampler_problems"]


def sampler_problems(
    key: str, sampling: LatentSamplingConfig, engine: EngineSpec, *, catalog: Catalog | None
) -> Iterator[Reason]:
    """Reasons against `kernel` and `guidance_mode` of the settings at `key`."""
    kernels = (engine.kernels, catalog.offered("kernels") if catalog is not None else None)
    guidances = (engine.guidances, catalog.offered("guidances") if catalog is not None else None)
    for name, value, (short, offered) in (
        ("kernel", sampling.kernel, kernels),
        ("guidance_mode", sampling.guidance_mode, guidances),
    ):
        others = sorted(offered or ()) if Cap.PLUGIN_SAMPLERS in engine.capabilities else []
        available = ", ".join([*sorted(short), *others]) or "nothing"
        if ":" not in value and value not in short:
            text = f"got {value!r}; engine {engine.name!r} supports {available}{did_you_mean(value, short) or '.'}"
            yield Reason(key=f"{key}.{name}", text=text)
        elif ":" in value and Cap.PLUGIN_SAMPLERS not in engine.capabilities:
            text = f"got {value!r}; engine {engine.name!r} computes none of plugins. It supports {available}."
            yield Reason(key=f"{key}.{name}", text=text)
        elif ":" in value and offered is not None and value not in offered:
            text = f"got {value!r}, which no loaded plugin offers. Available: {available}"
            yield Reason(key=f"{key}.{name}", text=f"{text}{did_you_mean(value, offered) or '.'}")
