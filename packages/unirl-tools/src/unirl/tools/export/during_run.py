"""Adapters of a run that goes on, from the weights that it trains: no model is loaded for them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from unirl.core.errors import RecipeError, RunFolderError
from unirl.loop.run_folder import RECIPE_FILE

from ..local_checkpoint import local_checkpoint
from .adapters import layouts_of, rank_of, write_diffusers_adapters, write_peft_adapters
from .card import write_card
from .layouts import components_of, is_pipeline, open_to_readers
from .metadata import adapter_metadata, date_of
from .source import TrainedModel

if TYPE_CHECKING:
    from unirl.core.roles import WeightUpdate
    from unirl.core.specs.plan import Plan

__all__ = ["write_adapters"]


def write_adapters(plan: Plan, updates: Mapping[str, WeightUpdate], *, run: Path, folder: Path, step: int) -> None:
    """Write what `unirl export` writes of these adapters, in a folder for each model where there are several.

    updates, run, folder, step: see `unirl_write_adapters`.  Raises RecipeError for a model whose base checkpoint is not
    on this machine, RunFolderError for files that cannot be written.
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
        layout, *_ = layouts_of(model.spec, is_pipeline=is_pipeline(base))
        facts: dict[str, Any] = {"step": step, "layout": layout, "is_pipeline": is_pipeline(base)}
        shared: dict[str, Any] = {
            "components": components_of(update.tensors, model.spec.trainable, base),
            "dtype": torch.float32,
            "metadata": adapter_metadata(source, base, date=date_of(time.time()), rank=rank_of(update), **facts),
        }
        try:
            if layout == "diffusers":
                write_diffusers_adapters(to, update, **shared)
            else:
                write_peft_adapters(to, update, module=None, base=str(path), **shared)
        except SafetensorError as error:
            raise RunFolderError(f"{to} cannot be written: {error}.") from error
        write_card(to, source, base, name=to.name, policy=plan.eval.policy, **facts)
        open_to_readers(to)
