"""The launcher `local`: everything in this process."""

from __future__ import annotations

from unirl.core.plugins.catalog import Catalog
from unirl.core.specs.plan import Plan

from .build import build_parts
from .config import LocalConfig
from .idle_offload import taking_turns
from .parts import Parts

__all__ = ["LocalLauncher", "build"]


def build(config: LocalConfig) -> LocalLauncher:
    return LocalLauncher(config)


class LocalLauncher:
    """Runs everything in this process, easy to debug."""

    def __init__(self, config: LocalConfig) -> None:
        self._config = config

    def launch(self, plan: Plan, *, catalog: Catalog) -> Parts:
        parts = build_parts(plan, catalog=catalog, offload=self._config.offload_idle)
        return taking_turns(parts, plan) if self._config.offload_idle else parts

    def close(self) -> None:
        pass
