"""The objects of a run, and how the weights that train reach the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .capability import Cap, Support
from .config import BackendConfig
from .errors import EchoMismatch, RunFailed, UniRLError
from .roles import Algorithm, Backend, Engine, Model, Policy, Reward, WeightReceipt, WeightUpdate

if TYPE_CHECKING:
    from .plan import Plan
    from .request import Request
    from .rollout import Rollout

__all__ = ["NoEngine", "Noted", "Parts", "attributed", "kept_weights", "sampled_policy", "sync_weights"]


@dataclass(frozen=True, kw_only=True)
class Noted:
    """What a launcher measured and noticed since it was last asked."""

    metrics: Mapping[str, float]
    """For the step that ends now."""
    findings: Sequence[str] = ()
    """What a user should know, such as a worker that was replaced."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The objects of a run, one for each choice of its plan."""

    model: Model
    backend: Backend
    engine: Engine
    algorithm: Algorithm
    rewards: Mapping[str, Reward]
    reward_weights: Mapping[str, float]
    sync: Callable[[], None] | None = None
    """Brings the weights that train to an engine that lives elsewhere and sets its version; checks what it then holds.
    None: the engine shares the weights, or takes them by `load_weights`, in this process."""
    snapshot: Callable[[], Callable[[], None]] | None = None
    """Beside `sync`: keeps the weights that train now; what it returns brings them as `sync` would have, once, from any
    thread, when training has gone on. None: weights go to the engine at once or not at all."""
    noted: Callable[[], Noted] | None = None
    """What moving data and weights took; the loop asks once a step."""
    generating: threading.Lock = field(default_factory=threading.Lock)
    """Held while a rollout is made on another thread: the engine's weights must stay as they are."""


@contextmanager
def attributed(owner: str, *, phase: str) -> Generator[None]:
    """What fails inside is `owner`'s: errors that do not say so themselves become a RunFailed that does."""
    try:
        yield
    except UniRLError:
        raise
    except Exception as error:
        raise RunFailed(f"{owner} failed in phase {phase!r}: {type(error).__name__}: {error}") from error


class NoEngine:
    """In place of the engine, in a process that generates nothing."""

    version = 0

    def generate(self, request: Request) -> Rollout:
        raise RuntimeError("rollouts are made by other processes")

    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        raise RuntimeError("rollouts are made by other processes")

    def sleep(self) -> None:
        """Nothing to free."""

    def wake(self) -> None:
        """Nothing was freed."""

    def close(self) -> None:
        """Nothing is held."""


def sync_weights(parts: Parts, plan: Plan) -> None:
    """Give the engine the weights that train, and check that it holds just those. Nothing to do when it shares them.

    Never while a rollout is made on another thread.
    """
    assert not parts.generating.locked(), "weights were to move under a rollout that is being generated"
    backend, engine = parts.backend, parts.engine
    if parts.sync is not None:
        if engine.version != backend.version:
            parts.sync()
    elif plan.engine.spec.support(Cap.WEIGHTS_SHARED) is Support.NATIVE:
        engine.version = backend.version
    elif engine.version != backend.version:
        _load(parts, plan, _exported(parts, plan))


@contextmanager
def sampled_policy(parts: Parts, plan: Plan, policy: Policy) -> Generator[None]:
    """Inside, the engine samples with the weights of this policy, and behind it with those that train.

    The module that trains goes over to them, and with it every engine that shares it; one in this process with weights
    of its own is sent them, and sent the live ones back. Raises RecipeError for a policy that the backend keeps not.
    """
    shares = plan.engine.spec.support(Cap.WEIGHTS_SHARED) is Support.NATIVE
    if policy == "live" or shares or parts.sync is not None:
        with parts.backend.policy(policy):
            yield
        return
    _load(parts, plan, _exported(parts, plan, policy=policy))
    yield
    _load(parts, plan, _exported(parts, plan))


def kept_weights(parts: Parts, plan: Plan) -> Callable[[], None] | None:
    """A copy of the weights that train now, for an engine that is busy: what is returned gives them to it, once.

    None where they can be brought at once only. Never for an engine that shares them.
    """
    if parts.sync is not None:
        return parts.snapshot() if parts.snapshot is not None else None
    assert plan.engine.spec.support(Cap.WEIGHTS_SHARED) is not Support.NATIVE
    update = _exported(parts, plan)
    return lambda: _load(parts, plan, update)


def _exported(parts: Parts, plan: Plan, *, policy: Policy = "live") -> WeightUpdate:
    # The reference is what adapters are added to, and has none.
    lora = plan.engine.spec.support(Cap.WEIGHTS_LORA) is Support.NATIVE and policy != "reference"
    assert isinstance(plan.backend.config, BackendConfig)
    trains = plan.backend.config.trains
    return parts.backend.weights(policy=policy, kind="full" if trains == "full" else ("lora" if lora else "merged"))


def _load(parts: Parts, plan: Plan, update: WeightUpdate) -> None:
    receipt = parts.engine.load_weights(update)
    if (receipt.version, receipt.checksum) != (update.version, update.checksum):
        raise EchoMismatch(
            f"weights: version {update.version} with checksum {update.checksum} was sent; engine {plan.engine.name!r} "
            f"holds version {receipt.version} with checksum {receipt.checksum}."
        )
