"""The Prometheus tracker: an HTTP server in the run's process, asked by a scraper."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Enum, Gauge, Info, start_http_server
from unirl.core.errors import RecipeError
from unirl.core.specs.check import check_config

from .config import PrometheusConfig

if TYPE_CHECKING:
    from unirl.core.roles import RunInfo
    from unirl.core.types.event import Event
    from unirl.core.types.media import Media
    from unirl.core.types.track import Track

__all__ = ["PrometheusTracker", "build"]

ADDRESS_FILE = "prometheus.txt"
"""In the run folder while it listens: the URL of its numbers."""
STATES = ("running", "done", "stopped", "failed")


def build(config: PrometheusConfig) -> PrometheusTracker:
    """The tracker of this config. Raises RecipeError for a port out of range."""
    check_config(config, key="tracker.prometheus")
    return PrometheusTracker(config)


class PrometheusTracker:
    """Serves the newest numbers of a run, from its start to its end; nothing is kept of earlier steps."""

    def __init__(self, config: PrometheusConfig) -> None:
        self._config = config
        self._server: tuple[WSGIServer, threading.Thread] | None = None

    def start(self, run: RunInfo) -> None:
        """Listen. Raises RecipeError where the port is taken, or the address is none of this machine's."""
        self._registry = registry = CollectorRegistry()
        self._metric = Gauge(
            "unirl_metric", "Newest value of each metric of steps and evaluations.", ["key"], registry=registry
        )
        self._phase = Gauge(
            "unirl_phase_seconds", "Seconds of each phase of the newest step.", ["phase"], registry=registry
        )
        self._step = Gauge("unirl_step", "Steps completed.", registry=registry)
        self._samples = Counter("unirl_samples", "Samples trained on since the process started.", registry=registry)
        self._findings = Counter("unirl_findings", "Findings since the process started.", registry=registry)
        self._saved = Gauge("unirl_checkpoint_seconds", "Seconds that the newest checkpoint took.", registry=registry)
        self._seen = Gauge(
            "unirl_last_event_timestamp_seconds", "Time of the newest event of the run.", registry=registry
        )
        self._state = Enum("unirl_state", "Whether the run goes on.", states=[*STATES], registry=registry)
        Info("unirl_run", "The run.", registry=registry).info(
            {"name": run.name, "plan": run.plan_hash, "folder": str(run.folder)}
        )
        self._step.set(run.resumed_at or 0)
        host, port = self._config.host, self._config.port
        try:
            self._server = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise RecipeError(
                f"tracker.prometheus.port: cannot listen on {host}:{port}: {error.strerror or error}. Another run may "
                "have it: give each its own, or 0 for a free one."
            ) from error
        self._address = run.folder / ADDRESS_FILE
        self._address.write_text(f"http://{host}:{self._server[0].server_port}/metrics\n", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        for key, value in metrics.items():
            self._metric.labels(key=key).set(float(value))

    def samples(self, key: str, track: Track, *, step: int, lineage: Mapping[str, Media]) -> None:
        """Nothing of samples is a number."""

    def event(self, event: Event) -> None:
        self._seen.set(event.time)
        if event.kind == "step":
            self._step.set(event.step)
            self._samples.inc(event.data["samples"])
            for name, seconds in event.data["phases"].items():
                self._phase.labels(phase=name).set(seconds)
        elif event.kind == "checkpoint_saved":
            self._saved.set(event.data["seconds"])
        elif event.kind == "finding":
            self._findings.inc()

    def finish(self, status: Literal["done", "stopped", "failed"]) -> None:
        """Stop listening. May be called twice."""
        if self._server is None:
            return
        self._state.state(status)
        (server, thread), self._server = self._server, None
        server.shutdown()
        server.server_close()
        thread.join()
        self._address.unlink(missing_ok=True)
