"""`unirl recipes`: the recipes that are installed or in `./recipes`."""

from __future__ import annotations

import click

__all__ = ["command"]


@click.command("recipes")
@click.option("--json", "as_json", is_flag=True, help="Print them as JSON.")
def command(as_json: bool) -> None:
    """List the recipes that are installed or in ./recipes; `unirl train NAME` runs one."""
    from ..recipe.files import list_recipes
    from .output import console, print_json, print_table

    recipes = list_recipes()
    rows = [
        {
            "name": recipe.name,
            "summary": recipe.summary,
            "from": recipe.root.owner or "./recipes",
            "file": str(recipe.file),
            "hides": [str(file) for file in recipe.hides],
        }
        for recipe in recipes
    ]
    if as_json:
        print_json(rows)
    elif not rows:
        console().print("No recipes: no installed package brings any, and there is no ./recipes here.")
    else:
        print_table(rows, columns=["name", "summary", "from"])
        for recipe in recipes:
            for file in recipe.hides:
                console().print(f"note: {recipe.name}: {recipe.file} hides {file}", soft_wrap=True)
