"""Results of `unirl doctor` that launchers contribute to: problems, and the machines of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["KEY_DISTS", "ClusterDiagnosis", "Finding"]

KEY_DISTS = ("torch", "diffusers", "transformers", "peft", "hydra-core", "pluggy", "safetensors", "numpy", "ray")
"""Dists whose versions should agree on all machines of a run, besides those of UniRL."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A problem and how to fix it."""

    check: str
    """`plugin`, `conflict`, `namespace`, `version`, `torch` or `disk`; in a cluster `machine`, `port`, `group`,
    `device`, `clock` or `memory`."""
    text: str


@dataclass(frozen=True, kw_only=True)
class ClusterDiagnosis:
    """A launcher's report on the machines of a cluster."""

    machines: tuple[Mapping[str, Any], ...]
    """JSON-able; `name`, `address`, `python`, `cpus`, `gpus`, `devices`, `dists` and `port` of each, and what else the
    launcher saw."""
    findings: tuple[Finding, ...]
