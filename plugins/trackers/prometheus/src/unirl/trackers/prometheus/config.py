"""Settings of the Prometheus tracker."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.core.limits import limit
from unirl.core.specs.part_config import PartConfig

__all__ = ["PrometheusConfig"]


@dataclass
class PrometheusConfig(PartConfig):
    host: str = "127.0.0.1"
    """Address to listen on; `0.0.0.0` lets every machine that reaches this one read the numbers."""
    port: int = limit(9464, least=0, most=65535)
    """Port to listen on; 0 takes a free one, which `prometheus.txt` in the run folder then names."""
