"""The VeOmni backend: its spec. VeOmni itself is imported where a backend is built, for it patches transformers."""

from __future__ import annotations

from collections.abc import Iterable

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap, Support
from unirl.core.specs.spec import BackendSpec

__all__ = ["SPEC", "unirl_backends"]

SPEC = BackendSpec(
    name="veomni",
    summary="Trains LoRA adapters or all weights with VeOmni: FSDP2, HSDP, experts split over ranks.",
    build="unirl.backends.veomni.backend:build",
    config="unirl.backends.veomni.config:VeomniConfig",
    capabilities={
        Cap.TRAIN_LORA: Support.NATIVE,
        Cap.TRAIN_FULL: Support.NATIVE,
        Cap.REFERENCE_ADAPTER_OFF: Support.NATIVE,
        Cap.REFERENCE_COPY: Support.NATIVE,
        Cap.EMA: Support.NATIVE,
        Cap.LAGGED_POLICY: Support.NATIVE,
        Cap.MANY_RANKS: Support.NATIVE,
        Cap.CRITIC: Support.NATIVE,
        Cap.THROUGH_SAMPLER: Support.NATIVE,
        Cap.LAZY_BUILD: Support.NATIVE,
    },
    enabled_by={
        Cap.TRAIN_LORA: {"trains": "lora"},
        Cap.TRAIN_FULL: {"trains": "full"},
        Cap.REFERENCE_ADAPTER_OFF: {"trains": "lora"},
        Cap.REFERENCE_COPY: {"trains": "full", "reference_copy": True},
        Cap.EMA: {"ema.kind": "constant", "ema.decay": 0.75, "ema.every": "step"},
        Cap.CRITIC: {"critic.lr": 1e-3, "critic.max_grad_norm": None},
        Cap.LAGGED_POLICY: {"lagged.kind": "constant", "lagged.decay": 0.75, "lagged.every": "rollout"},
    },
)


@hookimpl
def unirl_backends() -> Iterable[BackendSpec]:
    return [SPEC]
