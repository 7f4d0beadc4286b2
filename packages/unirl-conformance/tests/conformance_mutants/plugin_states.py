"""Catalogs whose claims end in one state each."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace

from unirl.conformance.doubles import tiny_denoiser as latent_model
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.part_config import PartConfig
from unirl.core.specs.spec import EngineSpec, Gap, TrackerSpec
from unirl.engines.trainside.plugin import SPEC as ENGINE

GAP = Gap(claim="every-setting-is-documented", reason="Nobody has found words for it.", link="https://example.org/1")
UNDOCUMENTED = f"{__name__}:Undocumented"

NOTES = TrackerSpec(
    name="notes",
    summary="Keeps notes of a run",
    build="unirl.core.names:did_you_mean",
    config="unirl.core.specs.part_config:PartConfig",
)


@dataclass
class Undocumented(PartConfig):
    width: int = 1


def _trackers(**dists: TrackerSpec) -> Catalog:
    return Catalog.of(
        {
            name.replace("_", "-"): SimpleNamespace(unirl_trackers=hookimpl(lambda spec=spec: [spec]))
            for name, spec in dists.items()
        }
    )


def gaps() -> Catalog:
    """One gap that is there, one that is closed, and one that is about another claim."""
    return _trackers(
        open=dataclasses.replace(NOTES, name="open", config=UNDOCUMENTED, gaps=(GAP,)),
        closed=dataclasses.replace(NOTES, name="closed", gaps=(GAP,)),
        undeclared=dataclasses.replace(NOTES, name="undeclared", config=UNDOCUMENTED),
        elsewhere=dataclasses.replace(
            NOTES, name="elsewhere", config=UNDOCUMENTED, gaps=(dataclasses.replace(GAP, only_with=("another",)),)
        ),
    )


def absent() -> Catalog:
    """A part whose implementation needs a package that is not installed."""
    return _trackers(needy=dataclasses.replace(NOTES, build="conformance_mutants.plugin_absent:build"))


def dies() -> Catalog:
    """A part that ends its process, next to one that does not."""
    return _trackers(
        deadly=dataclasses.replace(NOTES, name="deadly", build="conformance_mutants.plugin_dies:build"),
        broken=dataclasses.replace(NOTES, name="broken"),
    )


def refused() -> Catalog:
    """An engine that does not go with the only model, and one that states nothing of sleep."""
    unfit: EngineSpec = dataclasses.replace(
        ENGINE, name="unfit", capabilities=ENGINE.capabilities - {Cap.LATENT_ROLLOUT}
    )
    silent: EngineSpec = dataclasses.replace(
        ENGINE, name="silent", capabilities={cap for cap in ENGINE.capabilities if cap != Cap.SIGMAS}
    )
    return Catalog.of(
        {
            "planted": SimpleNamespace(
                unirl_models=hookimpl(lambda: [latent_model.SPEC]), unirl_engines=hookimpl(lambda: [unfit, silent])
            )
        }
    )
