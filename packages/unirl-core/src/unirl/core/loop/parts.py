"""The objects of a run, who makes them, generating with the engine, and syncing the weights that sample to it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ..errors import EchoMismatch, RunFailed, UniRLError
from ..roles import Algorithm, Backend, Engine, Model, Policy, Reward, WeightReceipt, WeightUpdate
from ..specs.capability import Cap, Support
from ..types.rollout import Rollout, verify_echo

if TYPE_CHECKING:
    from ..plugins.catalog import Catalog
    from ..specs.plan import Plan
    from ..types.request import Request
    from ..types.track import Track

__all__ = [
    "Launcher",
    "NoEngine",
    "Noted",
    "Parts",
    "attributed",
    "generate",
    "kept_weights",
    "sampled_policy",
    "sync_weights",
]


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
    noted: Callable[[], Noted] | None = None
    """What moving data and weights took; the loop asks once a step."""
    generating: threading.Lock = field(default_factory=threading.Lock)
    """Held while a rollout is made on another thread: the engine's weights must stay as they are."""


class Launcher(Protocol):
    """Makes the parts of a plan where they are to run. Build: `build(config) -> Launcher`.

    The parts that it gives fit the same roles as those of one process; the loop does not see the difference.
    """

    def launch(self, plan: Plan, *, catalog: Catalog) -> Parts:
        """Start whatever is needed and build every part.

        Raises PlanRejected, before anything starts, when it cannot fit. Called once. What was started before an error
        is stopped again.
        """
        ...

    def close(self) -> None:
        """Stop everything that was started. No process is left, whatever happened before. May be called twice."""
        ...


@contextmanager
def attributed(owner: str, *, phase: str) -> Generator[None]:
    """What fails inside is `owner`'s: errors that do not say so themselves become a RunFailed that does."""
    try:
        yield
    except UniRLError:
        raise
    except (Exception, SystemExit) as error:
        raise RunFailed(f"{owner} failed in phase {phase!r}: {type(error).__name__}: {error}") from error


class NoEngine:
    """In place of the engine, in a process that generates nothing."""

    version = 0

    def generate(self, request: Request) -> Track:
        raise RuntimeError("rollouts are made by other processes")

    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        raise RuntimeError("rollouts are made by other processes")

    def sleep(self) -> None:
        """Nothing to free."""

    def wake(self) -> None:
        """Nothing was freed."""

    def close(self) -> None:
        """Nothing is held."""


def generate(engine: Engine, requests: Mapping[str, Request]) -> Rollout:
    """The rollout of these requests, by track: one call of the engine for each.

    Raises EchoMismatch when the engine did not use what a request said.
    """
    tracks: dict[str, Track] = {}
    for name, request in requests.items():
        tracks[name] = engine.generate(request)
        verify_echo(request, tracks[name])
    return Rollout(tracks=tracks)


def sync_weights(parts: Parts, plan: Plan) -> None:
    """Give the engine the weights of the policy that samples, and check that it holds just those.

    Nothing to do when it shares them: `sampled_policy` switches them. Never while a rollout is made on another thread.
    """
    assert not parts.generating.locked(), "weights updated while a rollout is in flight"
    backend, engine = parts.backend, parts.engine
    sampler = plan.needs.sampler
    version = backend.version_of(sampler)
    if parts.sync is not None:
        if engine.version != version:
            parts.sync()
    elif _shares_weights(plan):
        engine.version = version
    elif engine.version != version:
        _load(parts, plan, _exported(parts, plan, policy=sampler))


@contextmanager
def sampled_policy(parts: Parts, plan: Plan, policy: Policy) -> Generator[None]:
    """Within the block the engine samples with the weights of this policy; call `sync_weights` before.

    An engine that shares the trained module samples inside `Backend.policy`. One with weights of its own holds those of
    the policy that samples rollouts; it is sent any others, and those again afterwards.
    Raises RecipeError for a policy that the backend does not keep.
    """
    backend, engine, sampler = parts.backend, parts.engine, plan.needs.sampler
    is_shared = parts.sync is None and _shares_weights(plan)
    if policy == sampler and (policy == "live" or not is_shared):
        yield
    elif parts.sync is not None:
        with backend.policy(policy):
            yield
    elif is_shared:
        synced = engine.version
        with backend.policy(policy):
            engine.version = backend.version_of(policy)
            try:
                yield
            finally:
                engine.version = synced
    else:
        _load(parts, plan, _exported(parts, plan, policy=policy))
        yield
        _load(parts, plan, _exported(parts, plan, policy=sampler))


def kept_weights(parts: Parts, plan: Plan) -> Callable[[], None] | None:
    """A copy of the weights that sample now, for an engine that is busy: what is returned gives them to it, once.

    None where a launcher brings them, which it does at once only. Never for an engine that shares them.
    """
    if parts.sync is not None:
        return None
    assert not _shares_weights(plan)
    update = _exported(parts, plan, policy=plan.needs.sampler)
    return lambda: _load(parts, plan, update)


def _shares_weights(plan: Plan) -> bool:
    return plan.engine.spec.support(Cap.WEIGHTS_SHARED) is Support.NATIVE


def _exported(parts: Parts, plan: Plan, *, policy: Policy) -> WeightUpdate:
    # The reference is what adapters are added to, and has none.
    lora = plan.engine.spec.support(Cap.WEIGHTS_LORA) is Support.NATIVE and policy != "reference"
    trains = plan.backend.config.trains
    return parts.backend.export_weights(
        policy=policy, kind="full" if trains == "full" else ("lora" if lora else "merged")
    )


def _load(parts: Parts, plan: Plan, update: WeightUpdate) -> None:
    receipt = parts.engine.load_weights(update)
    if (receipt.version, receipt.checksum) != (update.version, update.checksum):
        raise EchoMismatch(
            f"weights: version {update.version} with checksum {update.checksum} was sent; engine {plan.engine.name!r} "
            f"holds version {receipt.version} with checksum {receipt.checksum}."
        )
