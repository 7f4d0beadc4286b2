"""Building the parts of a plan, and closing them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

from unirl.core.errors import PlanRejected, RunFailed, UniRLError
from unirl.core.match.composition import weighted_rewards
from unirl.core.match.mismatch_bounds import train_settings
from unirl.core.roles import Algorithm, Backend, Engine, Model, Reward, WeightUpdate, diffusion_model
from unirl.core.roles.environment import RETURN
from unirl.core.specs.capability import Cap
from unirl.core.specs.part_config import PartConfig
from unirl.core.specs.plan import Choice, Learner, Plan, Stage
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.core.types.weights import MadeTensors, checksum

from .checked_environment import CheckedEnvironment
from .checked_reward import CheckedReward
from .parts import Launcher, NoEngine, Parts, attributed, errors_under, load, shares_weights
from .requests import sampling_errors
from .scoring import MediaScore
from .teachers import check_teachers

if TYPE_CHECKING:
    from unirl.core.plugins.catalog import Catalog
    from unirl.core.specs.spec import ModelPart, Spec
    from unirl.core.types.array import Array
    from unirl.core.types.media import MediaKind

__all__ = [
    "build_algorithms",
    "build_part",
    "build_parts",
    "build_rewards",
    "built_parts",
    "gradient_score",
    "reward_weights",
]


@contextmanager
def built_parts(plan: Plan, *, catalog: Catalog) -> Generator[Parts]:
    """The parts of a plan, built by its launcher or in this process, and closed at the end."""
    launcher: Launcher | None = build_part(plan.launcher, catalog) if plan.launcher else None
    try:
        parts = launcher.launch(plan, catalog=catalog) if launcher else build_parts(plan, catalog=catalog)
        environments = dict[str, CheckedEnvironment]()
        parts = dataclasses.replace(parts, environments=environments)
        try:
            _add_environments(environments, plan, catalog=catalog)
            yield parts
        finally:
            _close(parts, plan)
    finally:
        if launcher is not None:
            launcher.close()


def build_parts(
    plan: Plan,
    *,
    catalog: Catalog,
    rewards: Literal["all", "backpropagated", "none"] = "all",
    with_engine: bool = True,
    lazy: bool = False,
    offload: bool = False,
) -> Parts:
    """Build the parts of a plan in this process. What was built before an error is closed again.

    rewards: where another process scores, only those that a loss backpropagates, or none if no loss is computed.
    with_engine: False where another process generates.  lazy: this process is one of several
    ranks that train, so the model is built without values and the backend fills in this rank's shards, if both can, as
    it does for a backend that says so (`BackendConfig.fills_weights`); a teacher is sharded by the backend of its first
    student.
    offload: offload each backend before the next one is built.

    A model whose weights are not used in this process is built without values, if it can, and gets no backend.
    """
    import torch

    if plan.run.threads:
        torch.set_num_threads(plan.run.threads)
    torch.set_float32_matmul_precision(plan.run.matmul_precision)
    # Adapters are initialised from torch's global generator; all later noise is counter-based.
    torch.manual_seed(plan.run.seed)  # pyright: ignore[reportUnknownMemberType]
    device = _device(plan.run.device)
    models: dict[str, Model] = {}
    backends: dict[str, Backend] = {}
    engines: dict[str, Engine] = {}
    algorithms: dict[str, Algorithm] = {}
    scorers: dict[str, Reward] = {}
    parts = Parts(
        models=models,
        backends=backends,
        engines=engines,
        algorithms=algorithms,
        rewards=scorers,
        reward_weights=reward_weights(plan),
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "",
    )
    try:
        taught: list[tuple[Learner, Model]] = []
        for name, learner in plan.learners.items():
            is_used = _is_used(plan, name, with_engine=with_engine, with_losses=rewards != "none")
            keeper = _keeper(plan, learner, with_engine=with_engine) if lazy else learner
            empty = (learner.model, keeper.backend) if is_used else (learner.model,)
            fills = learner.backend is not None and learner.backend.config.fills_weights
            is_lazy = (lazy or fills or not is_used) and all(
                part is not None and Cap.LAZY_BUILD in part.spec.capabilities for part in empty
            )
            context: dict[str, Any] = {"lazy": True} if is_lazy else {}
            if learner.model.spec.optional_parts:
                context["serves"] = _serves(plan, name, with_engine=with_engine, with_losses=rewards != "none")
            models[name] = model = build_part(learner.model, catalog, device=device, **context)
            if learner.backend is None:
                _freeze(model)
                if is_lazy and is_used:
                    taught.append((keeper, model))
            elif is_used:
                # A worker that generates may have none of the stages that train the model.
                stages = [stage for stage in (*plan.trained, *plan.stages) if stage.learner.name == name]
                train = train_settings(stages[0])
                backends[name] = build_part(
                    learner.backend, catalog, model=model, train=train, steps=plan.run.max_steps, seed=plan.run.seed
                )
                if is_lazy:
                    _verify(model)
                if offload:
                    backends[name].offload()
            elif learner.backend.config.trains == "full":
                # In the dtype that a backend keeps: engines start in the dtype of the updates that they will receive.
                for param in model.trainable.parameters():
                    param.data = param.data.float() if param.requires_grad else param.data
        for keeper, model in taught:
            backends[keeper.name].hold_frozen(model)
            _verify(model)
        check_teachers(plan, models)
        _check_sampling(plan, models)
        backpropagated = {key for stage in plan.trained for key in _backpropagated(plan, stage)}
        keys = {"all": plan.rewards.keys(), "backpropagated": backpropagated, "none": ()}[rewards]
        for key in plan.rewards:
            if key in keys:
                scorers |= build_rewards(plan, catalog=catalog, keys=[key])
        if with_engine:
            for name, engine in _engines(plan, models, catalog=catalog, device=device):
                engines[name] = engine
        else:
            engines.update({stage.name: NoEngine() for stage in plan.stages})
        algorithms |= build_algorithms(plan, catalog=catalog, rewards=None if rewards == "none" else scorers)
        return parts
    except BaseException:
        _close(parts, plan)
        raise


def _verify(model: Model) -> None:
    """Verify a lazily built model that has its values now. Collective over the ranks that share it."""
    if model.spec.verifies_values:
        model.verify()


def _is_used(plan: Plan, learner: str, *, with_engine: bool, with_losses: bool) -> bool:
    """Whether this process computes with the weights of a model: it samples, teaches or trains."""
    own = [stage for stage in plan.stages if stage.learner.name == learner]
    samples = _samples(plan, learner, with_engine=with_engine)
    teaches = any(teacher.name == learner for stage in plan.stages for teacher in stage.teachers)
    # Without engine and losses it computes reference policies.
    asked = [stage for stage in own if with_losses or (not with_engine and stage.needs.reference != "none")]
    return samples or teaches or any(stage.backend is not None for stage in asked)


def _samples(plan: Plan, learner: str, *, with_engine: bool) -> bool:
    """Whether an engine of this process reads the weights of a model."""
    own = [stage for stage in plan.stages if stage.learner.name == learner]
    return with_engine and any(stage.engine.spec.reads_weights for stage in own)


def _keeper(plan: Plan, learner: Learner, *, with_engine: bool) -> Learner:
    """The learner whose backend shards this model: itself, or the first student of a teacher that does not sample
    here, where ranks could call it unequally often."""
    if learner.backend is None and not _samples(plan, learner.name, with_engine=with_engine):
        for stage in plan.trained:
            if learner.name in [teacher.name for teacher in stage.teachers]:
                return stage.learner
    return learner


def _serves(plan: Plan, learner: str, *, with_engine: bool, with_losses: bool) -> frozenset[ModelPart]:
    """The optional parts of a model that this process uses."""
    parts: set[ModelPart] = set()
    if with_engine:
        stages = [stage for stage in plan.stages if stage.learner.name == learner]
        parts.update(*(stage.engine.spec.parts_of(stage.model.spec) for stage in stages))
    trained = [stage for stage in plan.trained if stage.learner.name == learner]
    if with_losses and any(stage.needs.reward == "differentiable" for stage in trained):
        parts.add("decode")
    return frozenset(parts)


def _engines(plan: Plan, models: Mapping[str, Model], *, catalog: Catalog, device: Any) -> Iterator[tuple[str, Engine]]:
    """Each stage and its engine, see `Stage.shares_engine`."""
    built: list[tuple[Stage, Engine]] = []
    for stage in plan.stages:
        model = models[stage.learner.name]
        engine = next((engine for other, engine in built if stage.shares_engine(other)), None)
        if is_new := engine is None:
            engine = build_part(stage.engine, catalog, model=model, device=device)
            built.append((stage, engine))
        yield stage.name, engine
        if is_new and stage.backend is None and not shares_weights(stage):
            load(engine, stage, _frozen_weights(model))


def _add_environments(environments: dict[str, CheckedEnvironment], plan: Plan, *, catalog: Catalog) -> None:
    """Build the environment of each stage. Stages that chose the same section share it."""
    built: dict[str, CheckedEnvironment] = {}
    for stage in plan.stages:
        if (choice := stage.environment) is not None:
            if choice.key not in built:
                built[choice.key] = CheckedEnvironment(build_part(choice, catalog), choice=choice)
            environments[stage.name] = built[choice.key]


def _frozen_weights(model: Model) -> WeightUpdate:
    """Weights of a frozen model, which stay at version 0. If it was built without values, they are read on access."""
    held = {name: weight.detach() for name, weight in model.trainable.named_parameters()}

    def read(name: str) -> Array:
        tensor = held[name].new_empty(held[name].shape, device="cpu")
        model.fill({name: tensor})
        return tensor

    is_empty = any(weight.is_meta for weight in held.values())
    tensors = MadeTensors({name: partial(read, name) for name in held}, forms=held) if is_empty else held
    return WeightUpdate(version=0, tensors=tensors, kind="full", checksum=checksum(tensors))


def _freeze(model: Model) -> None:
    """Disable gradients and dropout in a frozen model."""
    module = model.trainable
    module.requires_grad_(False)
    module.eval()


def build_rewards(plan: Plan, *, catalog: Catalog, keys: Collection[str] | None = None) -> dict[str, Reward]:
    """Build only the rewards of a plan, by key. keys: of those to build; None is all."""
    device = _device(plan.run.device)
    result: dict[str, Reward] = {}
    for key, choice in plan.rewards.items():
        if keys is not None and key not in keys:
            continue
        with errors_under(choice.key, spec=choice.spec):
            spec = dataclasses.replace(choice.spec, parts=(*choice.spec.parts, *choice.config.further_parts()))
            result[key] = CheckedReward(choice.key, build_part(choice, catalog, device=device), spec=spec)
    return result


def reward_weights(plan: Plan, *, step: int | None = None) -> dict[str, float]:
    """Weight of each reward in the combined reward of a step; without one, that of the recipe."""
    configs = {key: choice.config for key, choice in plan.rewards.items()}
    return {key: float(one.weight if step is None else one.weight_at(step)) for key, one in configs.items()}


def build_algorithms(
    plan: Plan, *, catalog: Catalog, rewards: Mapping[str, Reward] | None = None
) -> dict[str, Algorithm]:
    """Build only the algorithms of a plan, by stage; they turn rewards into advantages and losses.

    rewards: for those that backpropagate them; None where no loss is computed.
    """
    weights = reward_weights(plan)
    result: dict[str, Algorithm] = {}
    for stage in plan.trained:
        assert stage.algorithm is not None
        train = train_settings(stage)
        returns = {} if stage.environment is None else {RETURN: float(stage.environment.config.weight)}
        credited = (child.name for child in plan.children(stage.name) if child.settings.credit != "none")
        result[stage.name] = build_part(
            stage.algorithm,
            catalog,
            advantage=stage.advantage,
            reward_weights={key: weights[key] for key in stage.rewards} | returns | dict.fromkeys(credited, 1.0),
            train=train,
            seed=plan.run.seed,
            **({"score": gradient_score(plan, stage, rewards)} if stage.needs.reward == "differentiable" else {}),
        )
    return result


def _backpropagated(plan: Plan, stage: Stage) -> list[str]:
    """Keys of the rewards whose gradient the loss of a stage takes, and of their gates."""
    if stage.needs.reward != "differentiable":
        return []
    return weighted_rewards(plan.rewards, {key: plan.rewards[key].config.weight for key in stage.rewards})


def gradient_score(plan: Plan, stage: Stage, rewards: Mapping[str, Reward] | None) -> MediaScore | None:
    """The score that the loss of a stage backpropagates, of rewards by key; None without them."""
    if rewards is None:
        return None
    keys, weights = _backpropagated(plan, stage), reward_weights(plan)
    fps = stage.sampling.fps if isinstance(stage.sampling, LatentSamplingConfig) else 0.0
    return MediaScore(
        rewards={key: rewards[key] for key in keys},
        weights={key: weights[key] for key in keys},
        kind=cast("MediaKind", stage.medium),
        rate=(fps or stage.model.spec.fps or None) if stage.medium == "video" else None,
        choices=plan.rewards,
    )


def build_part(choice: Choice[Spec, PartConfig], catalog: Catalog, **context: Any) -> Any:
    """One part of a plan, by the `build` of its spec. Raises RunFailed for any error that is not the user's."""
    build = catalog.resolve(choice.spec.build)
    try:
        with errors_under(choice.key, spec=choice.spec):
            part = build(choice.config, **context)
    except UniRLError:
        raise
    except (Exception, SystemExit) as error:
        notes = "".join(f". {note}" for note in getattr(error, "__notes__", ()))
        raise RunFailed(
            f"{choice.key}: {choice.spec.kind} {choice.name!r} could not be built: {type(error).__name__}: {error}"
            f"{notes}"
        ) from error
    if part is None:
        raise RunFailed(f"{choice.key}: {choice.spec.build!r} returned None, expected a {choice.spec.kind}.")
    return part


def _check_sampling(plan: Plan, models: Mapping[str, Model]) -> None:
    """Raise RecipeError for sizes and schedules of training or evaluation that only the loaded model can refuse."""
    for stage in plan.stages:
        if stage.kind == "latent":
            model = diffusion_model(models[stage.learner.name])
            for sampling, evaluates in ((stage.sampling, False), (stage.evaluation, True)):
                with sampling_errors(plan, stage, evaluates=evaluates):
                    model.latent_shape(cast(LatentSamplingConfig, sampling))
                    model.schedule(cast(LatentSamplingConfig, sampling))


def _close(parts: Parts, plan: Plan) -> None:
    """Close every part. The first failure is raised, or added as a note to the error that ends the run."""
    ending, failures = sys.exception(), list[UniRLError]()
    owned: list[tuple[str, Engine | Reward | Backend | CheckedEnvironment]] = []
    engines = {id(parts.engines[stage.name]): stage for stage in plan.stages if stage.name in parts.engines}
    owned += [(f"engine {stage.engine.name!r}", parts.engines[stage.name]) for stage in engines.values()]
    owned += [(f"reward.{key}", reward) for key, reward in parts.rewards.items()]
    hosted = {id(parts.environments[name]): (name, parts.environments[name]) for name in parts.environments}
    owned += [(f"environment of stage {name!r}", environment) for name, environment in hosted.values()]
    owned += [(_backend_name(plan.learners[name]), backend) for name, backend in parts.backends.items()]
    for owner, part in owned:
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


def _backend_name(learner: Learner) -> str:
    assert learner.backend is not None
    return f"backend {learner.backend.name!r}"


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
