"""The stages of a recipe: which model, engine and algorithm each one has, and who scores it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

from omegaconf import OmegaConf

from ..errors import RecipeError
from ..names import did_you_mean
from ..specs.config import RecipeConfig, StageConfig
from ..specs.part_config import RewardConfig
from ..specs.plan import Choice, Learner, Stage, medium_of
from ..specs.spec import ModelSpec
from ..types.sampling import SamplingConfig

__all__ = ["stages_of"]

Chosen = Mapping[str, Choice[Any, Any]]
T = TypeVar("T")


def stages_of(recipe: RecipeConfig, parts: Mapping[str, Chosen], rewards: Chosen) -> tuple[Stage, ...]:
    """The stages of a recipe, parents first. Without a section `stages` they are the tracks of its one model.

    parts: each kind of `PER_STAGE` -> its parts by name; one that is the section itself is "".
    Raises RecipeError for names that fit nothing and for sections that leave a stage open; OmegaConf's errors for
    values that do not fit the sections they are laid over.
    """
    learners = _learners(parts["model"], parts["backend"])
    settings = _in_order(_settings(recipe, learners))
    sampling, evaluation = _sampling(recipe.sampling, settings), _evaluation(recipe.eval.sampling, settings)
    environments = parts.get("environment", {})
    for group, chosen in (
        ("engine", parts["engine"]),
        ("environment", environments),
        ("algorithm", parts["algorithm"]),
    ):
        _check_names(group, chosen, settings)
    stages: list[Stage] = []
    for name, own in settings.items():
        learner = learners[own.model]
        track = _track(name, own, learner.model.spec)
        kind = learner.model.spec.tracks[track]
        if sampling[name].kind != kind:
            raise RecipeError(
                f"sampling: got settings of a {sampling[name].kind} track; track {track!r} of model "
                f"{learner.model.name!r} is a {kind} track. Choose `/{_at('sampling', name, settings)}: {kind}`."
            )
        engine = parts["engine"].get(name, parts["engine"].get(""))
        if engine is None:
            raise RecipeError(f"engine: stage {name!r} has none; choose `/engine@engine.{name}: NAME`.")
        # One section serves every stage of a model that trains.
        common = parts["algorithm"].get("") if learner.backend is not None else None
        stages.append(
            Stage(
                name=name,
                learner=learner,
                track=track,
                engine=engine,
                environment=environments.get(name, environments.get("")),
                algorithm=parts["algorithm"].get(name, common),
                sampling=sampling[name],
                advantage=_laid_over(recipe.advantage, own.advantage, key=f"stages.{name}.advantage"),
                train=_laid_over(recipe.train, own.train, key=f"stages.{name}.train"),
                samples=own.samples or (1 if own.parent else recipe.data.samples_per_prompt),
                settings=own,
                teachers=tuple(learners[each] for each in _teachers(own)),
                rewards=_scored_by(name, medium_of(learner.model.spec, track, sampling[name]), rewards, settings),
                eval_sampling=_typed(sampling[name], evaluation[name], _at("eval.sampling", name, settings, by=".")),
            )
        )
    return tuple(stages)


def _learners(models: Chosen, backends: Chosen) -> dict[str, Learner]:
    if "" in backends and len(models) > 1:
        at = " or ".join(f"`/backend@backend.{name}`" for name in models)
        raise RecipeError(f"backend: got one section for models {_listed(models)}; name the model that trains: {at}.")
    if unknown := sorted(set(backends) - set(models) - {""}):
        raise RecipeError(
            f"backend.{unknown[0]}: the recipe has no model of that name; it has {_listed(models)}. A backend is named "
            "like the model that it trains."
        )
    common = backends.get("")
    return {name: Learner(name=name, model=model, backend=backends.get(name, common)) for name, model in models.items()}


def _settings(recipe: RecipeConfig, learners: Mapping[str, Learner]) -> dict[str, StageConfig]:
    """The stages as the recipe gives them, with their models named."""
    (first, *others) = learners
    if not recipe.stages:
        if others:
            raise RecipeError(
                f"stages: the recipe has models {_listed(learners)} and no stages; name one for each track, such as "
                f"`stages: {{text: {{model: {first}}}}}`."
            )
        return {track: StageConfig(model=first, track=track) for track in learners[first].model.spec.tracks}
    result: dict[str, StageConfig] = {}
    for name, own in recipe.stages.items():
        if not own.model and others:
            raise RecipeError(f"stages.{name}.model: got none, expected one of {_listed(learners)}.")
        if own.model and own.model not in learners:
            hint = did_you_mean(own.model, learners) or "."
            raise RecipeError(
                f"stages.{name}.model: got {own.model!r}; the recipe has models {_listed(learners)}{hint}"
            )
        if own.reference and own.teachers:
            raise RecipeError(
                f"stages.{name}.teachers: got {_listed(own.teachers)} beside stages.{name}.reference={own.reference}; "
                "expected one of them."
            )
        if unknown := [each for each in _teachers(own) if each not in learners]:
            key = "reference" if own.reference else "teachers"
            hint = did_you_mean(unknown[0], learners) or "."
            raise RecipeError(
                f"stages.{name}.{key}: got {unknown[0]!r}; the recipe has models {_listed(learners)}{hint}"
            )
        if twice := [each for each in own.teachers if own.teachers.count(each) > 1]:
            raise RecipeError(f"stages.{name}.teachers: got {twice[0]!r} twice; name each model once.")
        model = own.model or first
        result[name] = replace(own, model=model)
    named = {name for own in result.values() for name in (own.model, *_teachers(own))}
    if unused := sorted(set(learners) - named):
        raise RecipeError(
            f"model.{unused[0]}: no stage uses this model; remove it, or give a stage `model: {unused[0]}` or "
            f"`reference: {unused[0]}`."
        )
    return result


def _teachers(own: StageConfig) -> list[str]:
    """Keys of the models that are reference policies of a stage."""
    return [own.reference] if own.reference else [*own.teachers]


def _in_order(settings: Mapping[str, StageConfig]) -> dict[str, StageConfig]:
    """Parents before their children. Raises RecipeError for a parent that is not a stage, and for a cycle."""
    result: dict[str, StageConfig] = {}

    def add(name: str, line: tuple[str, ...]) -> None:
        if name in line:
            cycle = " <- ".join([*line[line.index(name) :], name])
            raise RecipeError(f"stages.{name}.parent: the stages form a cycle: {cycle}. Remove the parent of one.")
        parent = settings[name].parent
        if parent and parent not in settings:
            hint = did_you_mean(parent, settings) or "."
            raise RecipeError(f"stages.{name}.parent: got {parent!r}; the stages are {_listed(settings)}{hint}")
        if parent:
            add(parent, (*line, name))
        result[name] = settings[name]

    for name in settings:
        add(name, ())
    return result


def _track(stage: str, own: StageConfig, model: ModelSpec) -> str:
    tracks = list(model.tracks)
    if own.track and own.track not in tracks:
        raise RecipeError(f"stages.{stage}.track: got {own.track!r}; model {model.name!r} has {_listed(tracks)}.")
    if own.track or stage in tracks:
        return own.track or stage
    if len(tracks) > 1:
        raise RecipeError(f"stages.{stage}.track: got none; model {model.name!r} has several: {_listed(tracks)}.")
    return tracks[0]


def _sampling(filled: Any, settings: Mapping[str, StageConfig]) -> Mapping[str, SamplingConfig]:
    """Stage -> its sampling. One stage takes the whole section, several have one section each."""
    if isinstance(filled, SamplingConfig):
        if len(settings) != 1:
            keys = ", ".join(f"/sampling@sampling.{name}" for name in settings)
            raise RecipeError(f"sampling: got one section, expected one for each of {_listed(settings)}: {keys}.")
        return dict.fromkeys(settings, filled)
    given = cast(Mapping[str, SamplingConfig], filled)
    if set(given) != set(settings):
        raise RecipeError(
            f"sampling: got sections for {_listed(sorted(given))}, expected one for each of {_listed(settings)}. Name "
            "them `/sampling@sampling.<stage>`."
        )
    return given


def _evaluation(given: Mapping[str, Any], settings: Mapping[str, StageConfig]) -> Mapping[str, Mapping[str, Any]]:
    """Stage -> its part of `eval.sampling`."""
    if len(settings) == 1:
        return dict.fromkeys(settings, given)
    if unknown := sorted(set(given) - set(settings)):
        raise RecipeError(
            f"eval.sampling.{unknown[0]}: with several stages it has one section each; they are {_listed(settings)}."
        )
    return {name: given.get(name, {}) for name in settings}


def _laid_over(base: T, given: Mapping[str, Any], *, key: str) -> T:
    """The dataclass `base` with the values of `given`, in the types of its fields, nested ones whole.

    key: config path of `given`. Raises OmegaConf's errors, of that path and what is below it, for a key that the
    dataclass does not have and for a value of another type.
    """
    if not given:
        return base
    config = OmegaConf.create({})
    OmegaConf.update(config, key, OmegaConf.structured(base))
    OmegaConf.update(config, key, dict(given), merge=True)
    return OmegaConf.to_object(OmegaConf.select(config, key))  # type: ignore[return-value]


def _typed(sampling: SamplingConfig, given: Mapping[str, Any], key: str) -> dict[str, Any]:
    laid = _laid_over(sampling.for_evaluation(given), given, key=key)
    return {name: getattr(laid, name) for name in given}


def _scored_by(stage: str, medium: str, rewards: Chosen, settings: Mapping[str, StageConfig]) -> tuple[str, ...]:
    """The rewards that score a stage: those that name it, and those of its medium that name none."""
    keys: list[str] = []
    for key, choice in rewards.items():
        named = cast(RewardConfig, choice.config).stage
        if named and named not in settings:
            hint = did_you_mean(named, settings) or "."
            raise RecipeError(f"reward.{key}.stage: got {named!r}; the stages are {_listed(settings)}{hint}")
        is_only = len(settings) == 1
        if named == stage or (not named and (is_only or choice.spec.media in ("any", medium))):
            keys.append(key)
    return tuple(keys)


def _check_names(group: str, parts: Chosen, settings: Mapping[str, StageConfig]) -> None:
    if unknown := sorted(set(parts) - set(settings) - {""}):
        hint = did_you_mean(unknown[0], settings) or "."
        raise RecipeError(f"{group}.{unknown[0]}: no such stage; the stages are {_listed(settings)}{hint}")


def _at(section: str, stage: str, settings: Mapping[str, StageConfig], *, by: str = "@") -> str:
    if len(settings) == 1:
        return section
    return f"{section}.{stage}" if by == "." else f"{section}@{section}.{stage}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "none"
