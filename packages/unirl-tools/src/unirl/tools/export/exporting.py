"""Exporting a checkpoint of a run: written beside the target, and renamed once complete."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError
from unirl.core.disk import writing
from unirl.core.errors import CheckpointError, RecipeError, RunFolderError, UniRLError
from unirl.model_host.model_files import check_contained

from .adapters import (
    Layout,
    layouts_of,
    rank_of,
    write_diffusers_adapters,
    write_named_adapters,
    write_peft_adapters,
)
from .card import write_card
from .layouts import components_of, is_pipeline, open_to_readers, write_checkpoint
from .metadata import adapter_metadata, date_of
from .source import RunSource, StoredModel, build_backend, build_model, open_run

if TYPE_CHECKING:
    from torch import nn
    from unirl.core.plugins.catalog import Catalog
    from unirl.core.roles import Backend, Policy, WeightUpdate

__all__ = ["export"]


def export(
    run: Path,
    to: Path,
    *,
    catalog: Catalog,
    merge: bool = False,
    step: int | None = None,
    policy: Policy = "live",
    model: str | None = None,
    dtype: str | None = None,
    layout: Layout | None = None,
    name: str | None = None,
) -> RunSource:
    """Export a checkpoint of a run folder into the new folder `to`; returns what was exported.

    merge, step, policy, model, dtype, layout: the options of `unirl export`.  name: under which its card loads it; that
    of the folder by default.
    Raises RunFolderError where `to` exists or cannot be written, CheckpointError and RecipeError as `open_run` does,
    for an option that does not fit the run, and for files of the base checkpoint that are links out of its folder.
    Whatever is raised, there is nothing at `to`.
    """
    if to.exists() or to.is_symlink():
        raise RunFolderError(f"--to: {to} exists already; give a new folder, or remove it.")
    source = open_run(run, step=step, model=model, catalog=catalog)
    if merge and not source.has_adapters:
        raise RecipeError(f"--merge: {run} trained all weights, so there are no adapters to merge; leave it out.")
    built = build_model(source, catalog=catalog)
    if not isinstance(built, StoredModel):
        raise RecipeError(
            f"{source.learner.model.key}: model {built.spec.name!r} does not say which folder it was loaded from "
            "(`folder`), so it cannot be exported."
        )
    base, part = built.folder, to.with_name(f".part-{to.name}")
    # Of a model that finds its checkpoint by itself.
    check_contained(base, key=f"{source.learner.model.key}.{source.learner.model.spec.path_key}")
    components = components_of(built.trainable.state_dict(), built.spec.trainable, base)
    wanted: torch.dtype | None = getattr(torch, dtype) if dtype else None
    is_adapter = source.has_adapters and not merge
    layout = _checked(layout, source, is_pipeline=is_pipeline(base), is_adapter=is_adapter)
    backend, source = build_backend(source, built, step=step, catalog=catalog)
    try:
        update = _weights(backend, source, policy, kind="lora" if is_adapter else "merged")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        with writing(to):
            if not is_adapter:
                fresh, variant = build_model(source, catalog=catalog).trainable, source.setting("variant")
                write_checkpoint(
                    part, update, module=fresh, base=base, components=components, variant=variant, dtype=wanted
                )
            else:
                _write_adapters(
                    part / to.name,
                    update,
                    layout,
                    source,
                    base=base,
                    module=built.trainable,
                    components=components,
                    dtype=wanted or torch.float32,
                )
            facts: dict[str, Any] = {"name": name or to.name, "policy": policy, "is_pipeline": is_pipeline(base)}
            write_card(part, source, base, step=source.checkpoint.step, layout=layout if is_adapter else None, **facts)
            open_to_readers(part)
        part.rename(to)
    except (OSError, SafetensorError) as error:
        raise RunFolderError(f"--to: {to} cannot be written: {error}.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
        backend.close()
    return source


def _checked(layout: Layout | None, source: RunSource, *, is_pipeline: bool, is_adapter: bool) -> Layout:
    """The layout that is written. Raises RecipeError for one that these weights do not have."""
    spec = source.learner.model.spec
    if not is_adapter:
        if layout not in (None, "diffusers") or (layout and not is_pipeline):
            library = "diffusers" if is_pipeline else "transformers"
            raise RecipeError(
                f"--layout: got {layout!r}, but a complete checkpoint is written as {library} loads it; leave it out. "
                "The other layouts are for adapters, of a run with backend.trains=lora exported without --merge."
            )
        return "diffusers"
    layouts = layouts_of(spec, is_pipeline=is_pipeline)
    if layout is not None and layout not in layouts:
        raise RecipeError(
            f"--layout: got {layout!r}, which model {spec.name!r} does not have; expected one of: {', '.join(layouts)}."
        )
    return layout or layouts[0]


def _write_adapters(
    file: Path,
    update: WeightUpdate,
    layout: Layout,
    source: RunSource,
    *,
    base: Path,
    module: nn.Module,
    components: Mapping[str, str],
    dtype: torch.dtype,
) -> None:
    """Write adapters. file: of a layout with a free choice of its name, without its ending."""
    metadata = adapter_metadata(
        source,
        base,
        step=source.checkpoint.step,
        date=_written(source.checkpoint.folder),
        layout=layout,
        rank=rank_of(update),
        is_pipeline=is_pipeline(base),
    )
    shared: dict[str, Any] = {"components": components, "dtype": dtype, "metadata": metadata}
    if layout == "diffusers":
        write_diffusers_adapters(file.parent, update, **shared)
    elif layout == "peft":
        path = str(source.setting("path") or base)
        write_peft_adapters(file.parent, update, module=module, base=path, **shared)
    else:
        spec = source.learner.model.spec
        write_named_adapters(file, update, layout=layout, spec=spec, module=module, base=base, **shared)


def _written(checkpoint: Path) -> str | None:
    """When a checkpoint was written, so that a second export says the same."""
    try:
        return date_of((checkpoint / "manifest.json").stat().st_mtime)
    except FileNotFoundError:
        # A run that goes on has removed it since it was read.
        return None


def _weights(backend: Backend, source: RunSource, policy: Policy, *, kind: Literal["lora", "merged"]) -> WeightUpdate:
    try:
        backend.version_of(policy)
    except UniRLError as error:
        raise CheckpointError(
            f"--policy: got {policy!r}, but {source.folder} kept no such weights; leave it out to export the live ones."
        ) from error
    return backend.export_weights(policy=policy, kind=kind)
