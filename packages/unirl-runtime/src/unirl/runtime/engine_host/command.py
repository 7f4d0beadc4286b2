"""`unirl engine-env`: make the Python environment of an engine that runs in one of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from unirl.core.catalog import Catalog

    from .environment import EngineEnvironment

__all__ = ["command"]


@click.command("engine-env")
@click.argument("name")
@click.option(
    "--accel", type=click.Choice(["cpu", "cuda"]), help="What it computes on; the default is what torch sees."
)
@click.option(
    "--release", default="", help="Release of the engine, `engine.release` of a recipe; the default is the newest."
)
@click.option("--dir", "within", type=click.Path(path_type=Path), help="Folder of environments, ~/.cache/unirl/envs.")
@click.option("--recreate", is_flag=True, help="Make it again, also when it is there.")
def command(name: str, accel: str | None, release: str, within: Path | None, recreate: bool) -> None:
    """Make the Python environment of engine NAME from the lock that its dist brings, and say where it is.

    Every file is checked against its hash. Uses uv where it is on the path, else venv and pip. Where the environment is
    there already, nothing is done. UNIRL_ENVS moves the folder of environments for every command.
    """
    from unirl.core.catalog import Catalog

    from .install import default_accel, install

    environment = _environment(Catalog.discover(), name).of(release)
    accel = accel or default_accel()
    if accel in environment.notes:
        click.echo(f"note: {environment.notes[accel]}", err=True)
    made = install(environment, accel, within=within, recreate=recreate)
    how = "was there already" if made.was_present else f"made in {made.seconds:.1f} s"
    click.echo(f"{made.folder}  {how}")


def _environment(catalog: Catalog, name: str) -> EngineEnvironment:
    from unirl.core.errors import RecipeError
    from unirl.core.spec import EngineSpec

    spec = catalog.get("engine", name).spec
    assert isinstance(spec, EngineSpec)
    if spec.environment:
        return catalog.resolve(spec.environment)
    others = [other.name for other in catalog.specs("engine") if isinstance(other, EngineSpec) and other.environment]
    raise RecipeError(
        f"engine-env: engine {name!r} runs in the environment of UniRL and needs none of its own; those that do: "
        f"{', '.join(sorted(others)) or 'none is installed'}."
    )
