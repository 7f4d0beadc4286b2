"""`unirl report DIR`: regenerate the report of a run folder."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["report"]


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the paths as JSON.")
def report(folder: Path, as_json: bool) -> None:
    """Regenerate the report of a run folder: the page and its pictures.

    Uses only the saved events and samples, so it also works for a run that crashed, is still running, or was copied
    from another machine.
    """
    from unirl.core.cli.output import print_json

    from .write import write_report

    files = write_report(folder)
    paths = {"page": files.page, "curves": files.curves, "contact_sheet": files.contact_sheet}
    if as_json:
        print_json({key: str(path.resolve()) if path else None for key, path in paths.items()})
        return
    for key, path in paths.items():
        click.echo(f"{key.replace('_', ' '):<14} {path.resolve() if path else 'none: the run has no held-out images'}")
