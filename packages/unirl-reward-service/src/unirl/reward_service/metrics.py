"""Prometheus metrics of a service."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

__all__ = ["Metrics"]

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """Metrics in a separate registry: a process may run several services."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own = self.registry
        self.requests = Counter(
            "unirl_reward_requests", "Requests to score, by code.", ["scorer", "code"], registry=own
        )
        self.repeated = Counter(
            "unirl_reward_repeated", "Requests answered by an earlier reply.", ["scorer"], registry=own
        )
        self.samples = Counter("unirl_reward_samples", "Samples scored.", ["scorer"], registry=own)
        self.restarts = Counter("unirl_reward_restarts", "Restarts of a scorer's process.", ["scorer"], registry=own)
        self.is_up = Gauge("unirl_reward_scorer_up", "1 while a scorer's process can score.", ["scorer"], registry=own)
        self.queue = Gauge("unirl_reward_queue_requests", "Requests that wait.", ["scorer"], registry=own)
        self.pending = Gauge("unirl_reward_pending_bytes", "Bodies that are held.", registry=own)
        self.seconds = Histogram(
            "unirl_reward_request_seconds", "From arrival to reply.", ["scorer"], buckets=SECONDS, registry=own
        )
        self.batch = Histogram(
            "unirl_reward_batch_samples", "Samples per batch.", ["scorer"], buckets=SIZES, registry=own
        )
