"""Plugins of a command: the installed ones and those of `--plugins-dir`, except those in UNIRL_DISABLE.

Both are passed on as environment variables, so that child processes see the same plugins.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from ..plugins.catalog import Catalog

__all__ = ["DISABLE", "PLUGINS_DIR", "allow_code_option", "disabled_names", "discover", "plugins_dir_option"]

PLUGINS_DIR = "UNIRL_PLUGINS_DIR"
"""A folder of single-file plugins."""
DISABLE = "UNIRL_DISABLE"
"""Comma-separated names of plugins not to load."""

ALLOW_CODE = "unirl.allow_code"
"""Whether the user allows foreign code, in the context of a command that asks for it."""

F = TypeVar("F", bound=Callable[..., Any])


def discover() -> Catalog:
    """The plugins of this command. Raises RecipeError for a missing folder, PluginNotFound for an unknown name in
    UNIRL_DISABLE."""
    from ..plugins.catalog import Catalog

    options: dict[str, Any] = {}
    if folder := os.environ.get(PLUGINS_DIR):
        from ..plugins.files import plugin_files

        options["files"] = plugin_files(Path(folder))
    if names := disabled_names():
        options["disabled"] = names
    catalog = Catalog.discover(**options)
    ctx = click.get_current_context(silent=True)
    catalog.allows_code = ctx is None or ctx.meta.get(ALLOW_CODE, True)
    return catalog


def disabled_names() -> list[str]:
    """Names of plugins not to load, from UNIRL_DISABLE."""
    return [name.strip() for name in os.environ.get(DISABLE, "").split(",") if name.strip()]


def plugins_dir_option(command: F) -> F:
    """`--plugins-dir`, for commands that discover plugins."""
    return click.option(
        "--plugins-dir",
        type=click.Path(path_type=Path, file_okay=False, exists=True),
        expose_value=False,
        callback=_set_folder,
        help=f"Also load every .py file of this folder as a plugin. {PLUGINS_DIR} does the same for every command.",
    )(command)


def allow_code_option(command: F) -> F:
    """`--allow-code`, for commands that take a recipe: without it, their plans may not name foreign code."""

    def remember(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        ctx.meta[ALLOW_CODE] = value

    return click.option(
        "--allow-code",
        is_flag=True,
        expose_value=False,
        callback=remember,
        help="Also run code that settings name from outside the installed plugins and the current folder; "
        "`unirl compose` lists it.",
    )(command)


def _set_folder(ctx: click.Context, param: click.Parameter, folder: Path | None) -> None:
    if folder is None:
        return
    before = os.environ.get(PLUGINS_DIR)
    os.environ[PLUGINS_DIR] = str(folder.absolute())

    def restore() -> None:
        if before is None:
            os.environ.pop(PLUGINS_DIR, None)
        else:
            os.environ[PLUGINS_DIR] = before

    ctx.call_on_close(restore)
