"""A plugin for one checkpoint, written from what the generic plugin of its layout finds in it."""

from __future__ import annotations

from pathlib import Path

from unirl.core.plugins.catalog import Catalog
from unirl.new import language_model, pipeline
from unirl.new.generic import generic_model
from unirl.new.names import Names

__all__ = ["files_from"]


def files_from(folder: Path, names: Names, *, catalog: Catalog, author: str = "") -> dict[str, str | bytes]:
    """Path -> content of every file of a plugin for the checkpoint in `folder`.

    Raises RecipeError for a folder that is not a checkpoint, or that the generic plugin refuses, with its reason.
    """
    generic = generic_model(folder)
    write = pipeline.files if generic == "diffusers" else language_model.files
    return write(folder, names, generic=generic, catalog=catalog, author=author)
