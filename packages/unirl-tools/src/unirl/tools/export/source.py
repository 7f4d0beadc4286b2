"""Source of exported weights: a checkpoint of a run, loaded into the parts that wrote it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from unirl.core.errors import CheckpointError, PlanRejected, RecipeError
from unirl.core.match.mismatch_bounds import train_settings
from unirl.core.match.named_code import not_allowed
from unirl.core.recipe.compose import compose
from unirl.core.specs.plan import Choice, Learner, Plan
from unirl.loop.build import build_part
from unirl.loop.checkpoints import Checkpoint, Checkpoints
from unirl.loop.run_folder import CHECKPOINTS, RECIPE_FILE

if TYPE_CHECKING:
    from unirl.core.plugins.catalog import Catalog
    from unirl.core.roles import Backend, Model

__all__ = ["RunSource", "StoredModel", "TrainedModel", "build_backend", "build_model", "open_run"]

ON_ONE_PROCESS = ("mesh", "shard", "mixed_precision", "activation_checkpointing", "compile")
"""Settings of a backend that say where its weights are and how it computes, and change nothing in a checkpoint. Their
defaults suit one process on a CPU."""


@runtime_checkable
class StoredModel(Protocol):
    """A model that was loaded from a folder in the layout of diffusers or transformers."""

    folder: Path


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model that a run trains."""

    folder: Path
    """Of the run."""
    recorded: Mapping[str, Any]
    """The run's recipe.json."""
    plan: Plan
    learner: Learner

    @property
    def has_adapters(self) -> bool:
        return self.learner.backend is not None and self.learner.backend.config.trains == "lora"

    def setting(self, name: str) -> Any:
        """One of the model's settings; None for a model without it."""
        return vars(self.learner.model.config).get(name)


@dataclass(frozen=True, kw_only=True)
class RunSource(TrainedModel):
    """A checkpoint of a run, and the model of it to export."""

    checkpoint: Checkpoint


def open_run(folder: Path, *, step: int | None, model: str | None, catalog: Catalog) -> RunSource:
    """The checkpoint of a step, by default the last one, and what is needed to load it.

    Raises CheckpointError for a folder without a run or a checkpoint, and where the recipe or the base checkpoint has
    changed since; PlanRejected for a model whose code a command does not allow; RecipeError for a model that the run
    does not train.
    """
    file, checkpoints = folder / RECIPE_FILE, Checkpoints(folder / CHECKPOINTS)
    try:
        recorded = json.loads(file.read_text(encoding="utf-8"))
        recipe, overrides, _ = (recorded[key] for key in ("recipe", "overrides", "dists"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder}: got no {RECIPE_FILE} in it, expected a run folder.") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file}: cannot be read as the recipe of a run ({error}).") from error
    steps = checkpoints.steps()
    if not steps:
        raise CheckpointError(f"{folder}: got a run without a checkpoint; train it first, see `run.save_every`.")
    if step is not None and step not in steps:
        raise CheckpointError(f"--step: got {step}, expected one of {', '.join(map(str, steps))}, the saved steps.")
    try:
        checkpoint = checkpoints.load(None if step is None else checkpoints.at(step))
    except CheckpointError as error:
        raise CheckpointError(f"{error} To export another one, --step takes {', '.join(map(str, steps))}.") from error
    plan = compose(recipe, overrides, catalog=catalog)
    if plan.hash != checkpoint.state.get("plan_hash"):
        raise CheckpointError(
            f"{file}: recipe {recipe!r} has changed since this checkpoint was written (hash {plan.hash}, expected "
            f"{checkpoint.state.get('plan_hash')}). Restore the recipe that the run was started with."
        )
    learner = _learner(plan, model)
    own = f"{learner.model.key}."
    if foreign := [reason for reason in not_allowed(plan, catalog=catalog) if reason.key.startswith(own)]:
        raise PlanRejected("\n".join(map(str, foreign)))
    source = RunSource(folder=folder, recorded=recorded, plan=plan, learner=learner, checkpoint=checkpoint)
    written = checkpoint.state.get("data", {})
    for key, version in learner.model.config.read_versions().items():
        name = f"{learner.model.key}{key}"
        if written.get(name, version) != version:
            raise CheckpointError(
                f"{name}: the files of {source.setting(key[1:])!r} have changed since the run began, so its weights do "
                "not fit them. Restore the old files."
            )
    return source


def build_model(source: RunSource, *, catalog: Catalog) -> Model:
    """The base model on the CPU, without the parts that do not train. Raises RecipeError if its checkpoint is gone."""
    choice = source.learner.model
    context: dict[str, Any] = {"serves": frozenset[str]()} if choice.spec.optional_parts else {}
    if source.setting("attention") is not None:
        # It may be a kernel of GPUs; here the library chooses.
        own = {item.name: item.default for item in dataclasses.fields(choice.config) if item.name == "attention"}
        choice = dataclasses.replace(choice, config=dataclasses.replace(choice.config, **own))
    return build_part(choice, catalog, device="cpu", **context)


def build_backend(source: RunSource, model: Model, *, step: int | None, catalog: Catalog) -> tuple[Backend, RunSource]:
    """The backend with the weights of the checkpoint, in this process alone; and what they are of.

    step: that was asked for. Without one, a checkpoint that a run removes while it is read gives way to the newest.
    Raises CheckpointError when it cannot be loaded.
    """
    choice, plan = source.learner.backend, source.plan
    assert choice is not None
    stage = next(stage for stage in (*plan.trained, *plan.stages) if stage.learner.name == source.learner.name)
    backend: Backend = build_part(
        _on_one_process(choice),
        catalog,
        model=model,
        train=train_settings(stage),
        steps=plan.run.max_steps,
        seed=plan.run.seed,
    )
    checkpoints = Checkpoints(source.folder / CHECKPOINTS)
    try:
        while True:
            try:
                backend.load(source.checkpoint.backend_folder(source.learner.name))
                return backend, source
            except (CheckpointError, OSError):
                if source.checkpoint.folder.exists():
                    raise
                chosen = None if step is None else checkpoints.at(step)
                source = dataclasses.replace(source, checkpoint=checkpoints.load(chosen))
    except BaseException:
        backend.close()
        raise


def _on_one_process(choice: Choice[Any, Any]) -> Choice[Any, Any]:
    defaults = {key: value for key, value in vars(type(choice.config)()).items() if key in ON_ONE_PROCESS}
    return dataclasses.replace(choice, config=dataclasses.replace(choice.config, **defaults))


def _learner(plan: Plan, model: str | None) -> Learner:
    """The model of this name, or the only one that trains."""
    trained = {name: learner for name, learner in plan.learners.items() if learner.backend is not None}
    names = ", ".join(name or "none" for name in trained)
    if model is not None and model not in trained:
        raise RecipeError(f"--model: got {model!r}, which the run does not train; expected one of: {names}.")
    if model is None and len(trained) > 1:
        raise RecipeError(f"--model: got none, but the run trains {names}; export each by its name, --model NAME.")
    return trained[model] if model is not None else next(iter(trained.values()))
