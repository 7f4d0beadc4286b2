"""`unirl plugins`: the parts that are installed, and the plugins that did not load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import click

from ..spec import KINDS, Kind

if TYPE_CHECKING:
    from ..catalog import Catalog

__all__ = ["command"]


@click.command("plugins")
@click.option("--kind", type=click.Choice(KINDS), help="Show the parts of this kind alone.")
@click.option("--check", is_flag=True, help="Also import what each part names and check that it keeps what it says.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def command(ctx: click.Context, kind: str | None, check: bool, as_json: bool) -> None:
    """List the parts that are installed, and the plugins that did not load with the reason. Exit codes: 0 good, 1 a
    part is wrong (--check), 3 a plugin did not load."""
    from ..catalog import Catalog

    catalog = Catalog.discover()
    chosen = cast(Kind | None, kind)
    parts = _parts(catalog, chosen)
    problems = _problems(catalog, chosen) if check else None
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

        document: dict[str, Any] = {"parts": parts, "plugins": records}
        print_json(document if problems is None else {**document, "problems": problems})
    else:
        _show(parts, records, problems)
    absent = any(record["status"] in ("broken", "refused") for record in records)
    ctx.exit(3 if absent else 1 if problems else 0)


def _parts(catalog: Catalog, kind: Kind | None) -> list[dict[str, str]]:
    return [
        {
            "kind": found.spec.kind,
            "name": found.spec.name,
            "summary": found.spec.summary,
            "dist": found.dist,
            "version": found.version,
        }
        for found in catalog.parts()
        if kind in (None, found.spec.kind)
    ]


def _problems(catalog: Catalog, kind: Kind | None) -> list[dict[str, str]]:
    return [
        {"kind": found.spec.kind, "name": found.spec.name, "dist": found.dist, "problem": problem}
        for found in catalog.parts()
        if kind in (None, found.spec.kind)
        for problem in catalog.validate(found.spec)
    ]


def _show(parts: list[dict[str, str]], records: list[dict[str, Any]], problems: list[dict[str, str]] | None) -> None:
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
            out.print(f"\nplugin {record['name']} ({record['dist']}): {sentence}", soft_wrap=True, markup=False)
    for problem in problems or ():
        out.print(f"\n{problem['kind']} {problem['name']}: {problem['problem']}", soft_wrap=True, markup=False)
    if problems == []:
        out.print(f"\n{len(parts)} parts checked: each keeps what its spec says.")
