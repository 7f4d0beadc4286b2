"""`--cfg job`, `--resolve`, `--package` and `--info defaults`, with the same meaning as in Hydra."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..errors import RecipeError

if TYPE_CHECKING:
    from ..plugins.catalog import Catalog

__all__ = ["dump_config", "dump_options"]

F = TypeVar("F", bound=Callable[..., Any])


def dump_options(command: F) -> F:
    """The options, for commands that compose."""
    for option in (
        click.option("--info", type=click.Choice(["defaults"]), help="Print the configs that are merged, in order."),
        click.option("--package", "-p", help="With --cfg: print only this section."),
        click.option("--resolve", is_flag=True, help="With --cfg: resolve interpolations."),
        click.option("--cfg", type=click.Choice(["job"]), help="Print the composed recipe as YAML and exit."),
    ):
        command = option(command)
    return command


def dump_config(
    recipe: str,
    overrides: Sequence[str],
    *,
    cfg: str | None,
    resolve: bool,
    package: str | None,
    info: str | None,
    catalog: Catalog,
) -> bool:
    """Print what these options ask for; False when they ask for nothing."""
    if cfg is None and info is None:
        if resolve or package:
            raise click.UsageError("--resolve and --package need --cfg job.")
        return False
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from ..recipe.compose import compose_config
    from ..recipe.errors import explain

    composed = compose_config(recipe, overrides, catalog=catalog)
    if info is not None:
        from .output import print_table

        rows = [
            {"config": path, "package": at or "_global_", "named_in": parent} for path, at, parent in composed.defaults
        ]
        print_table(rows, columns=["config", "package", "named_in"])
        return True
    node: Any = composed.config
    try:
        if package is not None:
            node = OmegaConf.select(node, package)
            if not isinstance(node, DictConfig):
                sections = ", ".join(str(key) for key in composed.config)
                raise RecipeError(f"--package {package}: the recipe has no such section; it has {sections}.")
            sys.stdout.write(f"# @package {package}\n")
        sys.stdout.write(OmegaConf.to_yaml(node, resolve=resolve))
    except OmegaConfBaseException as error:
        raise explain(error, recipe=composed.recipe.name, catalog=catalog) from error
    return True
