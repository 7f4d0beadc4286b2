"""The VeOmni backend: its spec. VeOmni itself is imported where a backend is built, for it patches transformers."""

from __future__ import annotations

from collections.abc import Iterable

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import BackendSpec

__all__ = ["SPEC", "unirl_backends"]

SPEC = BackendSpec(
    name="veomni",
    summary="Trains LoRA adapters or all weights with VeOmni: FSDP2, HSDP, experts split over ranks.",
    build="unirl.backends.veomni.backend:build",
    config="unirl.backends.veomni.config:VeomniConfig",
    capabilities={
        Cap.TRAIN_LORA,
        Cap.TRAIN_FULL,
        Cap.REFERENCE_ADAPTER_OFF,
        Cap.REFERENCE_COPY,
        Cap.EMA,
        Cap.LAGGED_POLICY,
        Cap.MANY_RANKS,
        Cap.CRITIC,
        Cap.FAKE_SCORE,
        Cap.THROUGH_SAMPLER,
        Cap.LAZY_BUILD,
    },
    enabled_by={
        Cap.TRAIN_LORA: {"trains": "lora"},
        Cap.TRAIN_FULL: {"trains": "full"},
        Cap.REFERENCE_ADAPTER_OFF: {"trains": "lora"},
        Cap.REFERENCE_COPY: {"trains": "full", "reference_copy": True},
        Cap.EMA: {"ema.kind": "constant", "ema.decay": 0.75, "ema.every": "step"},
        Cap.CRITIC: {"critic.lr": 1e-3, "critic.max_grad_norm": None},
        Cap.FAKE_SCORE: {"fake_score.lr": 1e-3, "fake_score.max_grad_norm": None},
        Cap.LAGGED_POLICY: {"lagged.kind": "constant", "lagged.decay": 0.75, "lagged.every": "rollout"},
    },
)


@hookimpl
def unirl_backends() -> Iterable[BackendSpec]:
    return [SPEC]
