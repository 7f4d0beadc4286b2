"""The objects of a run, and how the weights that train reach the engine."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .capability import Cap, Support
from .errors import EchoMismatch, RunFailed, UniRLError
from .roles import Algorithm, Backend, DiffusionModel, Engine, Reward

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["Parts", "attributed", "sync_weights"]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The objects of a run, one for each choice of its plan."""

    model: DiffusionModel
    backend: Backend
    engine: Engine
    algorithm: Algorithm
    rewards: Mapping[str, Reward]
    reward_weights: Mapping[str, float]


@contextmanager
def attributed(owner: str, *, phase: str) -> Generator[None]:
    """What fails inside is `owner`'s: errors that do not say so themselves become a RunFailed that does."""
    try:
        yield
    except UniRLError:
        raise
    except Exception as error:
        raise RunFailed(f"{owner} failed in phase {phase!r}: {type(error).__name__}: {error}") from error


def sync_weights(parts: Parts, plan: Plan) -> None:
    """Give the engine the weights that train, and check that it holds just those. Nothing to do when it shares them."""
    backend, engine = parts.backend, parts.engine
    if plan.engine.spec.support(Cap.WEIGHTS_SHARED) is Support.NATIVE:
        engine.version = backend.version
        return
    if engine.version == backend.version:
        return
    lora = plan.engine.spec.support(Cap.WEIGHTS_LORA) is Support.NATIVE
    trains = getattr(plan.backend.config, plan.backend.spec.trains_key)
    kind = "full" if trains == "full" else ("lora" if lora else "merged")
    update = backend.weights(kind=kind)
    receipt = engine.load_weights(update)
    if (receipt.version, receipt.checksum) != (update.version, update.checksum):
        raise EchoMismatch(
            f"weights: version {update.version} with checksum {update.checksum} was sent; engine {plan.engine.name!r} "
            f"holds version {receipt.version} with checksum {receipt.checksum}."
        )
