"""The FSDP2 backend: what it provides, and what it refuses before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from unirl.core.capability import Cap, Support
from unirl.core.gap_bounds import SIXTEEN_BITS
from unirl.core.hookspec import hookimpl
from unirl.core.match import needs_of
from unirl.core.spec import BackendSpec

from .config import Fsdp2Config, problems

if TYPE_CHECKING:
    from unirl.core.plan import Plan

__all__ = ["SPEC", "unirl_backends", "unirl_check_plan"]

SPEC = BackendSpec(
    name="fsdp2",
    summary="Trains LoRA adapters or all weights with torch FSDP2, on one rank or many.",
    build="unirl.backends.fsdp2.backend:build",
    config="unirl.backends.fsdp2.config:Fsdp2Config",
    capabilities={
        Cap.TRAIN_LORA: Support.NATIVE,
        Cap.TRAIN_FULL: Support.NATIVE,
        Cap.REFERENCE_ADAPTER_OFF: Support.NATIVE,
        Cap.REFERENCE_COPY: Support.NATIVE,
        Cap.EMA: Support.NATIVE,
        Cap.LAGGED_POLICY: Support.NATIVE,
        Cap.MANY_RANKS: Support.NATIVE,
        Cap.CRITIC: Support.NATIVE,
        Cap.THROUGH_SAMPLER: Support.NO,
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


@hookimpl
def unirl_check_plan(plan: Plan) -> Iterable[str]:
    config = plan.backend.config
    if not isinstance(config, Fsdp2Config):
        return []
    reasons = list(problems(config))
    needs = needs_of(plan)
    asks = f"algorithm {plan.algorithm.name!r}"
    keeps_reference = config.trains == "lora" or config.reference_copy or plan.has_reference_workers
    if needs.reference == "policy" and not keeps_reference:
        reasons.append(
            f"backend.reference_copy: {asks} compares with the reference policy, and full training keeps none; "
            "use backend.reference_copy=true, or workers of their own, such as launcher.reference=separate."
        )
    if needs.old_policy == "ema" and config.lagged.kind == "none":
        reasons.append(f"backend.lagged.kind: {asks} needs a lagged policy; set a kind, such as constant.")
    if needs.critic and config.critic.lr is None:
        reasons.append(
            f"backend.critic.lr: {asks} trains a critic, and none is kept; set its learning rate, such as 1e-5."
        )
    if config.critic.lr is not None and not needs.critic:
        reasons.append(
            f"backend.critic.lr: {config.critic.lr} was asked for; {asks} trains no critic. Use null, or an algorithm "
            "that does, such as ppo."
        )
    dtype, autocast = (getattr(plan.model.config, key, None) for key in ("dtype", "autocast"))
    if config.trains == "full" and dtype in SIXTEEN_BITS and autocast is None and config.mixed_precision == "none":
        reasons.append(
            f"backend.mixed_precision: none was asked for, and model.dtype={dtype}; weights that train are kept in "
            "float32, so nothing would compute in that dtype. Use bf16 or fp16, or model.dtype=float32."
        )
    if config.mesh.tensor > 1 and not plan.model.spec.tensor_parallel:
        reasons.append(f"backend.mesh.tensor: model {plan.model.name!r} gives no plan for splitting its layers; use 1.")
    if config.activation_checkpointing and not plan.model.spec.wrap_blocks:
        reasons.append(
            f"backend.activation_checkpointing: model {plan.model.name!r} names no blocks to recompute; leave it off."
        )
    return reasons
