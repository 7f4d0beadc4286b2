"""Bytes that each process of a plan will hold, predicted before anything starts.

docs/explanation/planning.md has the formulas. Sizes of the model are measured on shapes; nothing is loaded.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unirl.core.errors import RecipeError
from unirl.core.specs.capability import Cap
from unirl.core.specs.memory import TrainingMemory
from unirl.core.types.inputs import Inputs
from unirl.loop.build import build_algorithms, build_part
from unirl.loop.parts import errors_under

from .hollow import hollow
from .longest_prompt import longest_prompt
from .model_size import ModelSize, model_size
from .prediction import MemoryPlan
from .process_memory import ProcessMemory

if TYPE_CHECKING:
    from unirl.core.plugins.catalog import Catalog
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["memory_plan"]


def memory_plan(plan: Plan, *, catalog: Catalog, size: ModelSize | None = None, device_bytes: int = 0) -> MemoryPlan:
    """Predict what a plan with one stage that trains will hold.

    size: measured for a plan that differs in the launcher, in batch sizes or in where copies are kept; None measures.
    device_bytes: memory of each device; 0 where it is not known.

    `model.path` may be a folder without weights, with the configs and tokenizers alone. A model without `lazy-build` is
    built with its weights.
    Raises RecipeError for a plan of several stages, a backend or a model that cannot be predicted.
    """
    if len(plan.learners) != 1 or len(plan.stages) != 1 or plan.stages[0].backend is None:
        raise RecipeError(
            f"stages: got {', '.join(stage.name for stage in plan.stages)} with {len(plan.learners)} models, expected "
            "one that trains; memory of several stages or models is not predicted."
        )
    stage = plan.stages[0]
    assert stage.backend is not None
    memory = stage.backend.config.memory(plan)
    if memory is None:
        raise RecipeError(
            f"backend: {stage.backend.name!r} does not state what it holds with these settings (tensor and expert "
            "parallelism are not predicted)."
        )
    inputs, unread = longest_prompt(plan, stage)
    size = size or _measured(plan, stage, memory, catalog, inputs)
    algorithm = build_algorithms(plan, catalog=catalog)[stage.name]
    return ProcessMemory(plan, stage, memory, size, algorithm.separates_steps, device_bytes).plan(*unread)


def _measured(plan: Plan, stage: Stage, memory: TrainingMemory, catalog: Catalog, inputs: Inputs) -> ModelSize:
    """The model's sizes, built without values and without encoders where it can be."""
    spec, config = stage.model.spec, stage.model.config
    context: dict[str, Any] = {}
    with ExitStack() as stack:
        if Cap.LAZY_BUILD in spec.capabilities:
            context["lazy"] = True
            folder = Path(str(getattr(config, spec.path_key))).expanduser()
            if folder.is_dir():
                config = stack.enter_context(hollow(config, key=spec.path_key, folder=folder))
        if spec.optional_parts:
            # Conditions made from images pass through the VAE.
            context["serves"] = frozenset(["decode"] if spec.inputs else ())
        choice = type(stage.model)(
            key=stage.model.key, spec=spec, config=config, dist=stage.model.dist, version=stage.model.version
        )
        model = build_part(choice, catalog, device="cpu", **context)
        assert stage.backend is not None
        with errors_under(stage.backend.key, spec=stage.backend.spec):
            return model_size(
                model, sampling=stage.sampling, inputs=inputs, memory=memory, trajectory=stage.needs.trajectory
            )
