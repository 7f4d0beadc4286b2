"""`unirl registry`: for authors who want their plugin among the known parts."""

from __future__ import annotations

from pathlib import Path

import click
from unirl.core.errors import PluginNotInstalled

__all__ = ["command"]


@click.group("registry")
def command() -> None:
    """The public list of known parts."""


@command.command("validate")
@click.argument("dist")
@click.option(
    "--report",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="The conformance.json of `unirl conformance --plugin DIST --report FOLDER`: it has to be whole and of this "
    "version.",
)
@click.pass_context
def validate(ctx: click.Context, dist: str, report: Path | None) -> None:
    """Check that DIST, installed from its wheel, can be listed, and print the lines to add to registry/plugins.toml.

    Exit codes: 0 it can be listed, 1 something is missing, 2 incorrect usage, 3 it is not installed.
    """
    from importlib.metadata import PackageNotFoundError, distribution

    from unirl.core.cli.discovery import discover
    from unirl.new.registry import entries, problems, report_problems

    try:
        found = distribution(dist)
    except PackageNotFoundError as error:
        raise PluginNotInstalled(
            f"DIST: {dist!r} is not installed. Build its wheel and install that: `uv build`, `pip install dist/*.whl`."
        ) from error
    catalog = discover()
    listed = [*problems(found, catalog=catalog), *(report_problems(found, report) if report else ())]
    for problem in listed:
        click.echo(f"- {problem}")
    if listed:
        ctx.exit(1)
    for kind, lines in entries(found, catalog=catalog).items():
        click.echo(f"[{kind}]")
        for line in lines:
            click.echo(line)
    if report is None:
        click.echo("\nIts conformance was not checked: give --report.", err=True)
