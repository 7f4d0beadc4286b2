"""`unirl plugins`: the installed parts, and plugins that did not load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import click

from ..specs.spec import KINDS, Kind
from .discovery import plugins_dir_option

if TYPE_CHECKING:
    from ..plugins.catalog import Catalog

__all__ = ["command"]


@click.group("plugins", invoke_without_command=True)
@click.option("--kind", type=click.Choice(KINDS), help="Only show parts of this kind.")
@plugins_dir_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def command(ctx: click.Context, kind: str | None, as_json: bool) -> None:
    """List the installed parts, and plugins that did not load with the reason. Exit codes: 0 success, 1 two plugins
    provide the same part, 3 a plugin did not load."""
    if ctx.invoked_subcommand is not None:
        return
    from .discovery import discover

    catalog = discover()
    parts = _parts(catalog, cast(Kind | None, kind))
    records = [
        {
            "name": record.name,
            "dist": record.dist,
            "version": record.version,
            "module": record.module,
            "status": record.status,
            "error": record.error,
            "conflicts": list(record.conflicts),
        }
        for record in catalog.records
    ]
    if as_json:
        from .output import print_json

        print_json({"parts": parts, "plugins": records})
    else:
        _show(parts, records)
    absent = any(record["status"] in ("broken", "refused") for record in records)
    conflicts = any(record["conflicts"] for record in records)
    ctx.exit(3 if absent else 1 if conflicts else 0)


@command.command("search")
@click.argument("words", nargs=-1)
@click.option("--kind", type=click.Choice(KINDS), help="Only show parts of this kind.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def search(words: tuple[str, ...], kind: str | None, as_json: bool) -> None:
    """Known parts, installed or not, whose name, dist, kind or summary has all of WORDS.

    Nothing is downloaded: the list is that of this release.
    """
    from ..plugins.registry import known_parts
    from .discovery import discover

    installed = {(result.spec.kind, result.spec.name) for result in discover().parts()}
    found = [
        {
            "kind": part.kind,
            "name": part.name,
            "summary": part.summary,
            "by": part.by or "UniRL",
            "get": "installed" if (part.kind, part.name) in installed else part.hint,
        }
        for part in known_parts().parts
        if part.kind in (KINDS if kind is None else [kind])
        and all(word.lower() in f"{part.kind} {part.name} {part.dist} {part.summary}".lower() for word in words)
    ]
    if as_json:
        from .output import print_json

        print_json({"parts": found})
        return
    from .output import console, print_table

    if found:
        print_table(found, columns=["kind", "name", "summary", "by", "get"])
    else:
        console().print("No known part has all of these words. `unirl new` writes one to start from.", markup=False)


def _parts(catalog: Catalog, kind: Kind | None) -> list[dict[str, str]]:
    return [
        {
            "kind": result.spec.kind,
            "name": result.spec.name,
            "summary": result.spec.summary,
            "dist": result.dist,
            "version": result.version,
        }
        for result in catalog.parts()
        if kind in (None, result.spec.kind)
    ]


def _show(parts: list[dict[str, str]], records: list[dict[str, Any]]) -> None:
    from ..plugins.catalog import LEAVE_OUT
    from .output import console, print_table

    out = console()
    if parts:
        print_table(parts, columns=["kind", "name", "summary", "dist", "version"])
    else:
        out.print("No parts are installed." if not records else "No part of this kind is installed.")
    for record in records:
        if record["status"] != "loaded":
            text = f"plugin {record['name']} ({record['dist']} {record['version']}) is {record['status']}: "
            out.print(f"\n{text}{record['error']}", soft_wrap=True, markup=False)
        for sentence in record["conflicts"]:
            out.print(
                f"\nplugin {record['name']} ({record['dist']}): {sentence}. {LEAVE_OUT}", soft_wrap=True, markup=False
            )
