"""`unirl view RUNS...`: many runs beside each other, in a browser."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["view"]


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUNS...", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Listen on this address of this machine.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8420, show_default=True, help="Port; 0 takes a free one."
)
@click.option(
    "--static",
    "into",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Write the page into this folder instead, to copy or to publish.",
)
def view(runs: tuple[Path, ...], host: str, port: int, into: Path | None) -> None:
    """Look at RUNS in a browser: run folders, and folders with runs in them.

    Shows all runs in a table, curves over each other, differences of recipes, samples side by side, findings, times and
    memory. New events appear while a run writes them. Needs no network; Ctrl-C ends it.
    """
    from .library import Library
    from .server import start_server
    from .static_page import write_static

    library = Library(runs)
    if into is not None:
        click.echo(f"{len(library.runs)} runs    {write_static(library, into).resolve()}")
        return
    with start_server(library, host=host, port=port) as server:
        click.echo(f"{len(library.runs)} runs    {server.url}    Ctrl-C ends it")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            click.echo("ended")
