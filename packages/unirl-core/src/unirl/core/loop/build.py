"""Building the parts of a plan, and closing them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PlanRejected, RunFailed, UniRLError
from ..match.mismatch_bounds import mismatch_bounds
from ..roles import Algorithm, Reward
from ..specs.config import PartConfig, TrainConfig
from ..specs.plan import Choice, Plan
from .parts import Launcher, NoEngine, Parts, attributed
from .reward_guard import GuardedReward, errors_under

if TYPE_CHECKING:
    from ..plugins.catalog import Catalog
    from ..specs.spec import Spec

__all__ = [
    "build_algorithm",
    "build_part",
    "build_parts",
    "build_rewards",
    "built_parts",
    "reward_weights",
    "with_batch_invariance",
    "with_run_folder",
]


@contextmanager
def built_parts(plan: Plan, *, catalog: Catalog) -> Generator[Parts]:
    """The parts of a plan, built by its launcher or in this process, and closed at the end."""
    launcher: Launcher | None = build_part(plan.launcher, catalog) if plan.launcher else None
    try:
        parts = launcher.launch(plan, catalog=catalog) if launcher else build_parts(plan, catalog=catalog)
        try:
            yield parts
        finally:
            _close(parts, plan)
    finally:
        if launcher is not None:
            launcher.close()


def build_parts(plan: Plan, *, catalog: Catalog, with_rewards: bool = True, with_engine: bool = True) -> Parts:
    """Build the parts of a plan in this process, in the order model, backend, engine, algorithm, rewards.

    with_rewards, with_engine: False where another process scores or generates.
    """
    import torch

    if plan.run.threads:
        torch.set_num_threads(plan.run.threads)
    # Adapters are initialised from torch's global generator; all later noise is counter-based.
    torch.manual_seed(plan.run.seed)  # pyright: ignore[reportUnknownMemberType]
    device = _device(plan.run.device)
    model = build_part(plan.model, catalog, device=device)
    backend = build_part(
        plan.backend, catalog, model=model, train=_train_settings(plan), steps=plan.run.max_steps, seed=plan.run.seed
    )
    engine = build_part(plan.engine, catalog, model=model, device=device) if with_engine else NoEngine()
    algorithm = build_algorithm(plan, catalog=catalog)
    rewards = build_rewards(plan, catalog=catalog) if with_rewards else {}
    return Parts(
        model=model,
        backend=backend,
        engine=engine,
        algorithm=algorithm,
        rewards=rewards,
        reward_weights=reward_weights(plan),
    )


def build_rewards(plan: Plan, *, catalog: Catalog) -> dict[str, Reward]:
    """Build only the rewards of a plan, by key."""
    device = _device(plan.run.device)
    result: dict[str, Reward] = {}
    for key, choice in plan.rewards.items():
        with errors_under(choice.key, name=choice.name):
            result[key] = GuardedReward(choice.key, build_part(choice, catalog, device=device), spec=choice.spec)
    return result


def reward_weights(plan: Plan) -> dict[str, float]:
    """Weight of each reward in the combined reward."""
    return {key: float(choice.config.weight) for key, choice in plan.rewards.items()}


def build_algorithm(plan: Plan, *, catalog: Catalog) -> Algorithm:
    """Build only the algorithm of a plan, which plans requests and turns rewards into advantages."""
    weights, train = reward_weights(plan), _train_settings(plan)
    return build_part(
        plan.algorithm, catalog, advantage=plan.advantage, reward_weights=weights, train=train, seed=plan.run.seed
    )


def _train_settings(plan: Plan) -> TrainConfig:
    """`train` of the plan, with the default mismatch bounds filled in."""
    bounds = mismatch_bounds(plan)
    return dataclasses.replace(plan.train, logp_mismatch_max=bounds.largest, logp_mismatch_mean=bounds.mean)


def build_part(choice: Choice[Spec, PartConfig], catalog: Catalog, **context: Any) -> Any:
    """One part of a plan, by the `build` of its spec. Raises RunFailed for any error that is not the user's."""
    build = catalog.resolve(choice.spec.build)
    try:
        part = build(choice.config, **context)
    except UniRLError:
        raise
    except (Exception, SystemExit) as error:
        raise RunFailed(
            f"{choice.key}: {choice.spec.kind} {choice.name!r} could not be built: {type(error).__name__}: {error}"
        ) from error
    if part is None:
        raise RunFailed(f"{choice.key}: {choice.spec.build!r} returned None, expected a {choice.spec.kind}.")
    return part


def with_batch_invariance(plan: Plan) -> Plan:
    """The plan with `engine.batch_invariant` set if the run is batch-invariant and the engine has such a mode."""
    config = plan.engine.config
    if not plan.run.batch_invariant or "batch_invariant" not in {item.name for item in dataclasses.fields(config)}:
        return plan
    return dataclasses.replace(
        plan, engine=dataclasses.replace(plan.engine, config=dataclasses.replace(config, **{"batch_invariant": True}))
    )


def with_run_folder(plan: Plan, folder: Path) -> Plan:
    """The plan with `{run}` in its engine's settings replaced by the run folder."""
    config = plan.engine.config
    texts = {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
    named = {
        name: text.replace("{run}", str(folder.resolve()))
        for name, text in texts.items()
        if isinstance(text, str) and "{run}" in text
    }
    return (
        dataclasses.replace(plan, engine=dataclasses.replace(plan.engine, config=dataclasses.replace(config, **named)))
        if named
        else plan
    )


def _close(parts: Parts, plan: Plan) -> None:
    """Close every part. The first failure is raised, or added as a note to the error that ends the run."""
    ending, failures = sys.exception(), list[UniRLError]()
    owned = {
        f"engine {plan.engine.name!r}": parts.engine,
        **{f"reward.{key}": reward for key, reward in parts.rewards.items()},
        f"backend {plan.backend.name!r}": parts.backend,
    }
    for owner, part in owned.items():
        try:
            with attributed(owner, phase="close"):
                part.close()
        except UniRLError as error:
            failures.append(error)
    if ending is not None:
        for failure in failures:
            ending.add_note(str(failure))
    elif failures:
        raise failures[0]


def _device(asked: str) -> Any:
    import torch

    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise PlanRejected(f"run.device: got {asked!r}, expected `auto`, `cpu`, `cuda` or `cuda:N`.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise PlanRejected(
            f"run.device: got {asked!r}, but torch {torch.__version__} finds no CUDA device here; use `auto` or `cpu`."
        )
    return device
