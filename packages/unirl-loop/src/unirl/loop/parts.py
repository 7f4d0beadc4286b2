"""The objects of a run and the launcher that makes them; generating with an engine, and syncing weights to it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from unirl.core.errors import EchoMismatch, RunFailed, UniRLError
from unirl.core.match.mismatch_bounds import train_settings
from unirl.core.roles import (
    Algorithm,
    Backend,
    Engine,
    Job,
    Model,
    Policy,
    Reward,
    WeightReceipt,
    WeightUpdate,
)
from unirl.core.specs.capability import Cap
from unirl.core.types.rollout import verify_echo

from .checked_environment import CheckedEnvironment

if TYPE_CHECKING:
    from unirl.core.plugins.catalog import Catalog
    from unirl.core.specs.plan import Plan, Stage
    from unirl.core.specs.spec import Spec
    from unirl.core.types.request import Request
    from unirl.core.types.track import Track

    from .costs import Speed

__all__ = [
    "Launcher",
    "LauncherReport",
    "NoEngine",
    "Parts",
    "StageParts",
    "attributed",
    "engine_names",
    "errors_under",
    "generate",
    "kept_weights",
    "load",
    "sampled_policy",
    "shares_weights",
    "stage_job",
    "sync_weights",
    "weight_dtypes",
]


@dataclass(frozen=True, kw_only=True)
class LauncherReport:
    """A launcher's metrics and findings since the last report."""

    metrics: Mapping[str, float]
    """Metrics of the step that ends now."""
    findings: Sequence[str] = ()
    """News for the user, such as a worker that was replaced."""


@dataclass(frozen=True, kw_only=True)
class StageParts:
    """The objects of one stage."""

    model: Model
    backend: Backend
    engine: Engine
    algorithm: Algorithm


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The objects of a run."""

    models: Mapping[str, Model]
    """By learner."""
    backends: Mapping[str, Backend]
    """By learner, for those that train."""
    engines: Mapping[str, Engine]
    """By stage; stages share an object by `Stage.shares_engine`."""
    algorithms: Mapping[str, Algorithm]
    """By stage, for those that are trained on."""
    rewards: Mapping[str, Reward]
    reward_weights: Mapping[str, float]
    environments: Mapping[str, CheckedEnvironment] = field(default_factory=lambda: dict[str, CheckedEnvironment]())
    """By stage; stages that chose the same section share an object. They run where the loop does."""
    sync: Callable[[Stage], None] | None = None
    """Brings the weights that train to a stage's engine that lives elsewhere and sets its version; checks what it then
    holds. None: the engine shares the weights, or takes them by `load_weights`, in this process."""
    report: Callable[[], LauncherReport] | None = None
    """Traffic of data and weights, and findings; the loop asks once a step."""
    device_name: str = ""
    """Product name of the devices that train; empty on CPUs."""
    speed: Speed | None = None
    """Operations of a step, for the rates that it logs; None where they are not predicted."""

    def version(self, stage: Stage, policy: Policy | None = None) -> int:
        """Version of the weights that a stage samples with, or of another policy of its model; 0 of a frozen one."""
        backend = self.backends.get(stage.learner.name)
        return 0 if backend is None else backend.version_of(policy or stage.needs.sampler)

    @property
    def only(self) -> StageParts:
        """The parts of a run with one stage that trains."""
        ((stage, engine),), ((learner, backend),) = self.engines.items(), self.backends.items()
        return StageParts(model=self.models[learner], backend=backend, engine=engine, algorithm=self.algorithms[stage])

    @property
    def versions(self) -> dict[str, int]:
        """Optimizer steps that each learner has taken."""
        return {name: backend.version for name, backend in self.backends.items()}


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
    """Errors inside that do not name `owner` become a RunFailed that does; one without a phase gets this phase."""
    try:
        yield
    except (UniRLError, CancelledError) as error:
        if isinstance(error, RunFailed):
            error.phase = error.phase or phase
        raise
    except (Exception, SystemExit) as error:
        raise RunFailed(f"{owner} failed in phase {phase!r}: {type(error).__name__}: {error}", phase=phase) from error


@contextmanager
def errors_under(key: str, *, spec: Spec) -> Generator[None]:
    """Errors inside name the part by its key in the recipe: a part calls itself `model`, `reward.<name>` or
    `tracker.<name>`, and may be `stages.image.model` or `reward.second`."""
    try:
        yield
    except UniRLError as error:
        if spec.kind in ("reward", "tracker"):
            own = rf"(?<![\w./-]){spec.kind}\.{re.escape(spec.name)}(?=[:.=])"
        else:
            # Further on, `model.` may begin the name of a weight.
            own = rf"^{spec.kind}(?=[:.])"
        error.args = (re.sub(own, lambda _: key, str(error)), *error.args[1:])
        raise


class NoEngine:
    """Placeholder for processes without an engine."""

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


def generate(engine: Engine, request: Request, *, parent: str | None = None) -> Track:
    """The track of a request. parent: the stage that it continues from.

    Raises EchoMismatch when the engine did not use the settings of the request.
    """
    track = engine.generate(request)
    verify_echo(request, track)
    return dataclasses.replace(track, parent_track=parent)


def engine_names(plan: Plan) -> str:
    """The engines of a plan, as the owner of a phase."""
    return " or ".join(dict.fromkeys(f"engine {stage.engine.name!r}" for stage in plan.stages))


def stage_job(parts: Parts, plan: Plan, track: Track) -> Job:
    """The training job of the stage that a track is named after."""
    stage = plan.stage(track.name)
    return Job(
        track=track,
        algorithm=parts.algorithms[stage.name],
        name=stage.name,
        weight=stage.settings.weight,
        # Stages that share a model have their own settings; those of a single one are the backend's.
        train=train_settings(stage) if len(plan.trained) > 1 else None,
        references={teacher.name: parts.models[teacher.name] for teacher in stage.teachers},
        reference_guidance=stage.settings.reference_guidance,
    )


def sync_weights(parts: Parts, plan: Plan) -> None:
    """Give every engine the weights of the policy that samples, and check that it holds just those.

    Nothing to do where it shares them, `sampled_policy` switches them, and for a frozen model. Call it while no engine
    generates, see `unirl.loop.queue.GroupQueue.settle`.
    """
    for stage in plan.stages:
        engine, version = parts.engines[stage.name], parts.version(stage)
        if stage.backend is None or engine.version == version:
            continue
        if parts.sync is not None:
            parts.sync(stage)
        elif shares_weights(stage):
            engine.version = version
        else:
            load(parts.engines[stage.name], stage, _exported(parts, stage, policy=stage.needs.sampler))


@contextmanager
def sampled_policy(parts: Parts, stage: Stage, policy: Policy | None = None) -> Generator[None]:
    """Within the block the stage's engine samples with the weights of this policy; call `sync_weights` before.

    policy: None is the one that samples rollouts.
    An engine that shares the trained module samples inside `Backend.policy`. One with its own weights holds those of
    the policy that samples rollouts; it is sent any others, and those again afterwards. A frozen model has one policy.
    Raises RecipeError for a policy that the backend does not keep.
    """
    backend, engine, sampler = parts.backends.get(stage.learner.name), parts.engines[stage.name], stage.needs.sampler
    policy = policy or sampler
    is_shared = parts.sync is None and shares_weights(stage)
    if backend is None or (policy == sampler and (policy == "live" or not is_shared)):
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
        load(engine, stage, _exported(parts, stage, policy=policy))
        yield
        load(engine, stage, _exported(parts, stage, policy=sampler))


def kept_weights(parts: Parts, stage: Stage) -> Callable[[], None]:
    """Copy the weights that sample now, for a busy engine; returns a function that loads them into it, to call once.

    Not for weights that a launcher syncs, which it does only immediately, nor for an engine that shares them.
    """
    assert parts.sync is None and not shares_weights(stage)
    update = _exported(parts, stage, policy=stage.needs.sampler)
    kept = dataclasses.replace(update, tensors=dict(update.tensors))
    return lambda: load(parts.engines[stage.name], stage, kept)


def shares_weights(stage: Stage) -> bool:
    """Whether a stage's engine samples with the module of its model, not with its own weights."""
    return Cap.WEIGHTS_SHARED in stage.engine.spec.capabilities


def _exported(parts: Parts, stage: Stage, *, policy: Policy) -> WeightUpdate:
    assert stage.backend is not None
    # The reference is the base that adapters are added to, and has none.
    lora = Cap.WEIGHTS_LORA in stage.engine.spec.capabilities and policy != "reference"
    is_full = stage.backend.config.trains == "full"
    return parts.backends[stage.learner.name].export_weights(
        policy=policy,
        kind="full" if is_full else ("lora" if lora else "merged"),
        dtypes=weight_dtypes(parts.engines[stage.name]),
    )


def weight_dtypes(engine: Engine) -> Mapping[str, str] | None:
    """`Engine.weight_dtypes`; None of an engine without them."""
    return getattr(engine, "weight_dtypes", None)


def load(engine: Engine, stage: Stage, update: WeightUpdate) -> None:
    """Give a stage's engine these weights. Raises EchoMismatch when it then holds others."""
    receipt = engine.load_weights(update)
    if (receipt.version, receipt.checksum) != (update.version, update.checksum):
        raise EchoMismatch(
            f"weights: version {update.version} with checksum {update.checksum} was sent; engine {stage.engine.name!r} "
            f"holds version {receipt.version} with checksum {receipt.checksum}."
        )
