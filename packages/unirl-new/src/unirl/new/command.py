"""`unirl new`: write a working, tested and publishable plugin."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import cast

import click
from unirl.core.errors import RecipeError
from unirl.new.kinds import KINDS, NewKind

__all__ = ["new"]


@click.command(short_help="Write a plugin of any kind to start from.")
@click.argument("kind", type=click.Choice(tuple(KINDS)))
@click.argument("name")
@click.option(
    "--into",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    show_default="here",
    help="Folder in which the plugin's own folder is made.",
)
@click.option(
    "--from",
    "checkpoint",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Write a model for the checkpoint in this folder, in the layout of diffusers or transformers, from what "
    "model=diffusers, causal-lm or vlm finds in it. The whole checkpoint is loaded.",
)
@click.option("--dist", default="", metavar="DIST", help="What `pip install` takes.  [default: unirl-KIND-NAME]")
@click.option("--author", default="", metavar="AUTHOR", help="Name, or 'Name <name@example.org>', for its metadata.")
def new(kind: str, name: str, into: Path, checkpoint: Path | None, dist: str, author: str) -> None:
    """Write a plugin with one part of KIND, called NAME in recipes: code that works, its tests, a workflow.

    Exit codes: 0 success, 2 a name or a folder that is taken or invalid.
    """
    from unirl.core.cli.discovery import discover
    from unirl.new.names import Names, check_names
    from unirl.new.render import check_folder, render, write

    names = Names.of(cast(NewKind, kind), name, dist=dist)
    catalog = discover()
    check_names(names, catalog=catalog)
    folder = into / names.dist
    check_folder(folder)
    files: Mapping[str, str | bytes]
    if checkpoint is None:
        files = render(names, author=author)
    else:
        if kind != "model":
            raise RecipeError(f"--from: got it for a new {kind}; only models are written from a checkpoint.")
        # It imports torch.
        from unirl.new.from_checkpoint import files_from

        files = files_from(checkpoint, names, catalog=catalog, author=author)
    write(files, folder)
    click.echo(f"wrote {folder}/")
    for file in files:
        click.echo(f"  {file}")
    # Environments that uv makes have no pip. Its module is not looked for: before Python 3.12 that alone takes
    # setuptools its own distutils, and torch.compile then fails in this process.
    pip = "pip" if any(distributions(name="pip")) else "uv pip"
    click.echo("\nIt works as it is. Try it:\n")
    for line in (
        f"cd {shlex.quote(str(folder))}",
        f"{pip} install --editable . --group dev",
        "unirl plugins",
        f"unirl conformance --plugin {names.dist}",
        "pytest",
    ):
        click.echo(f"  {line}")
    if checkpoint is not None:
        click.echo("\nIts README.md has the facts of the checkpoint, and what to change first.")
        return
    part = f"src/{names.package}/{KINDS[names.kind].modules[0]}.py"
    click.echo(f"\nThen implement yours in {part}, and describe it in the spec in src/{names.package}/plugin.py.")
    if kind == "model":
        click.echo(
            "One gap is declared there: a model is verified against a reference pipeline, and this one has none yet."
        )
