"""Adapters of a run that goes on, from the weights that it trains: no model is loaded for them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from unirl.core.errors import RecipeError
from unirl.loop.run_folder import RECIPE_FILE

from ..local_checkpoint import local_checkpoint
from .card import write_card
from .layouts import components_of, is_pipeline, open_to_readers, write_diffusers_adapters, write_peft_adapters
from .source import TrainedModel

if TYPE_CHECKING:
    from unirl.core.roles import WeightUpdate
    from unirl.core.specs.plan import Plan

__all__ = ["write_adapters"]


def write_adapters(plan: Plan, updates: Mapping[str, WeightUpdate], *, run: Path, folder: Path, step: int) -> None:
    """Write what `unirl export` writes of these adapters, in a folder for each model where there are several.

    updates, run, folder, step: see `unirl_write_adapters`.  Raises RecipeError for a model whose base checkpoint is not
    on this machine.
    """
    recorded: dict[str, Any] = json.loads((run / RECIPE_FILE).read_text(encoding="utf-8"))
    for name, update in updates.items():
        source = TrainedModel(folder=run, recorded=recorded, plan=plan, learner=plan.learners[name])
        model = source.learner.model
        path, revision = source.setting(model.spec.path_key), source.setting("revision")
        base = local_checkpoint(str(path or ""), revision=revision)
        if base is None:
            raise RecipeError(
                f"{model.key}.{model.spec.path_key}: got {path!r}, which is not on this machine; an export needs its "
                "layout and license."
            )
        to = folder / name if len(updates) > 1 else folder
        to.mkdir(exist_ok=True)
        if is_pipeline(base):
            components = components_of(update.tensors, model.spec.trainable, base)
            write_diffusers_adapters(to, update, components=components, dtype=torch.float32)
        else:
            write_peft_adapters(to, update, module=None, base=str(path), dtype=torch.float32)
        facts: dict[str, Any] = {"policy": plan.eval.policy, "is_adapter": True, "is_pipeline": is_pipeline(base)}
        write_card(to, source, base, step=step, **facts)
        open_to_readers(to)
