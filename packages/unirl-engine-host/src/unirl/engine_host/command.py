"""`unirl engine-env`: create the Python environment of an external engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from unirl.core.plugins.catalog import Catalog

    from .environment import EngineEnvironment

__all__ = ["command"]


@click.command("engine-env", short_help="Create the Python environment of an external engine.")
@click.argument("name")
@click.option("--accel", type=click.Choice(["cpu", "cuda"]), help="Accelerator; by default the one torch sees.")
@click.option(
    "--release", default="", help="Release of the engine (`engine.release` in a recipe); by default the newest."
)
@click.option("--dir", "within", type=click.Path(path_type=Path), help="Folder of environments, ~/.cache/unirl/envs.")
@click.option("--recreate", is_flag=True, help="Recreate an existing environment.")
def command(name: str, accel: str | None, release: str, within: Path | None, recreate: bool) -> None:
    """Create the Python environment of engine NAME from its lock file, and print its path.

    Every file is checked against its hash. Uses uv if it is on the PATH, else venv and pip. Does nothing if the
    environment exists. UNIRL_ENVS sets the folder of environments for all commands.
    """
    from unirl.core.cli.discovery import discover

    from .install import default_accel, install

    environment = _environment(discover(), name).of(release)
    accel = accel or default_accel()
    if accel in environment.notes:
        click.echo(f"note: {environment.notes[accel]}", err=True)
    made = install(environment, accel, within=within, recreate=recreate, tell=lambda line: click.echo(line, err=True))
    how = "already exists" if made.was_present else f"created in {made.seconds:.1f} s"
    click.echo(f"{made.folder}  {how}")


def _environment(catalog: Catalog, name: str) -> EngineEnvironment:
    from unirl.core.errors import RecipeError
    from unirl.core.specs.spec import EngineSpec

    spec = catalog.get("engine", name).spec
    assert isinstance(spec, EngineSpec)
    if spec.environment:
        return catalog.resolve(spec.environment)
    others = [other.name for other in catalog.specs("engine") if isinstance(other, EngineSpec) and other.environment]
    raise RecipeError(
        f"engine-env: engine {name!r} runs in UniRL's own environment; engines that need a separate one: "
        f"{', '.join(sorted(others)) or 'none is installed'}."
    )
