"""`unirl conformance`: try the claims on what is installed, show what was found, and write the reports."""

from __future__ import annotations

import sys
from collections.abc import Collection
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click
from click.core import ParameterSource
from unirl.core.errors import RecipeError
from unirl.core.names import did_you_mean
from unirl.core.spec import Kind

from .claims import TIERS, Tier

if TYPE_CHECKING:
    from unirl.core.catalog import Catalog

    from .results import Report
    from .subjects import Selection

__all__ = ["conformance"]

SELECTABLE: tuple[Kind, ...] = ("model", "engine", "algorithm", "backend", "reward", "tracker", "launcher", "transport")


def _part_options(command: click.Command) -> click.Command:
    for kind in reversed(SELECTABLE):
        text = f"Try the claims about this {kind}, and its combinations. May be given again."
        command = click.option(f"--{kind}", multiple=True, metavar="NAME", help=text)(command)
    return command


@click.command(context_settings={"ignore_unknown_options": False})
@click.option("--plugin", multiple=True, metavar="DIST", help="Try everything that this dist provides.")
@click.option("--claim", multiple=True, metavar="CLAIM", help="Try this claim alone.")
@click.option(
    "--tier",
    type=click.Choice(TIERS),
    default="tiny",
    show_default=True,
    help="static: nothing is built. tiny: miniatures on the CPU. gpu: the same on a GPU too. full: what takes minutes.",
)
@click.option(
    "--report", "folder", type=click.Path(path_type=Path, file_okay=False), help="Write all reports to this folder."
)
@click.option(
    "--diff",
    "old",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Show what changed since this conformance.json; something that got worse counts as a failure.",
)
@click.option(
    "--from",
    "source",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Show this conformance.json instead of trying anything.",
)
@click.option("--claims", "list_claims", is_flag=True, help="List the claims and what each means.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.argument("pytest_args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def conformance(
    ctx: click.Context,
    plugin: tuple[str, ...],
    claim: tuple[str, ...],
    tier: str,
    folder: Path | None,
    old: Path | None,
    source: Path | None,
    list_claims: bool,
    as_json: bool,
    pytest_args: tuple[str, ...],
    **parts: tuple[str, ...],
) -> None:
    """Prove the installed parts: each claim on each part, and on each combination that fits.

    Plain flags of pytest go after `--`, such as `-- -n 2` or `-- --tb=long -rA`.

    Exit codes: 0 good, 1 a claim failed, 2 wrong use, 3 a plugin is absent or nothing could run.
    """
    if list_claims:
        _refuse_others(ctx, "--claims", allowed={"list_claims", "as_json"})
        _list(as_json=as_json)
        return
    from .report.diff import compare, print_diff
    from .report.terminal import print_report
    from .report.words import count_of
    from .report.write import write_reports
    from .results import load, to_json
    from .subjects import Selection

    # Before anything runs: it may take minutes, and its reports may be written over this one.
    before = load(old) if old is not None else None
    selection: Selection | None = None
    if source is not None:
        _refuse_others(ctx, "--from", allowed={"source", "folder", "old", "as_json"})
        report = load(source)
    else:
        if pytest_args and not pytest_args[0].startswith("-"):
            raise click.UsageError(
                f"{pytest_args[0]!r} is no option. Name a part by its kind, such as --engine {pytest_args[0]}; flags "
                "of pytest go after `--`."
            )
        names: dict[Kind, tuple[str, ...]] = {kind: parts[kind] for kind in SELECTABLE if parts[kind]}
        selection = Selection(names=names, plugins=plugin, claims=claim)
        if folder is not None:
            pytest_args = (f"--junitxml={folder.resolve() / 'junit.xml'}", *pytest_args)
        # The line of progress goes where it does not mix with JSON.
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            report = _run(selection, tier=cast(Tier, tier), pytest_args=pytest_args)
    if as_json:
        click.echo(to_json(report), nl=False)
    else:
        print_report(report)
    code = report.exit_code
    if before is not None:
        diff = compare(before, report, selected=selection)
        print_diff(diff, stderr=as_json)
        code = 1 if diff.got_worse else code
    if folder is not None:
        written = write_reports(report, folder)
        single = [path for path in written if path.parent == folder]
        for line in (*single, f"{count_of(len(written) - len(single), 'badge')} in {folder / 'badges'}"):
            click.echo(f"wrote {line}", err=as_json)
    ctx.exit(code)


_part_options(conformance)


def _run(selection: Selection, *, tier: Tier, pytest_args: tuple[str, ...]) -> Report:
    from unirl.core.catalog import Catalog

    from .claims import all_claims, claim_kinds
    from .run import run_suite
    from .subjects import devices_of

    # Before pytest starts, so that a wrong name has its own message and exit code.
    catalog = Catalog.discover()
    selection.check(catalog)
    if tier != "static":
        _check_environments(selection.names.get("engine", ()), catalog, devices=devices_of(tier))
    kinds = claim_kinds()
    for name in selection.claims:
        if name not in kinds:
            hint = did_you_mean(name, kinds) or "; `unirl conformance --claims` lists them."
            raise RecipeError(f"--claim: there is no claim {name!r}{hint}")
    report = run_suite(selection, tier=tier, pytest_args=pytest_args)
    if not report.outcomes:
        higher = [
            f"{one.name!r} is of tier {one.tier}"
            for one in all_claims([kinds[name] for name in selection.claims])
            if one.name in selection.claims and TIERS.index(one.tier) > TIERS.index(tier)
        ]
        raise RecipeError(
            f"conformance: nothing matches what was asked for at tier {tier}; no claim was tried."
            + "".join(f" Claim {text}." for text in higher)
        )
    return report


def _check_environments(engines: Collection[str], catalog: Catalog, *, devices: Collection[str]) -> None:
    """Raises PluginNotInstalled for an engine whose own environment is there for none of these devices: of what was
    asked for, nothing could be tried."""
    from unirl.core.errors import PluginNotInstalled
    from unirl.core.spec import EngineSpec

    for name in engines:
        spec = catalog.get("engine", name).spec
        if not isinstance(spec, EngineSpec) or not spec.environment:
            continue
        environment = catalog.resolve(spec.environment)
        if not any(environment.is_present(device) for device in devices):
            commands = " or ".join(f"`{environment.command(device)}`" for device in devices)
            raise PluginNotInstalled(
                f"engine {name!r} runs in an environment of its own, which is not here. Make it: {commands}."
            )


def _refuse_others(ctx: click.Context, flag: str, *, allowed: Collection[str]) -> None:
    """Raises UsageError for an option beside `flag` that would not be honoured."""
    for param in ctx.command.params:
        name = param.name or ""
        if name in allowed or ctx.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        given = param.opts[0] if isinstance(param, click.Option) else "flags of pytest"
        raise click.UsageError(f"{flag} runs nothing, so {given} means nothing with it. Leave one of them out.")


def _list(*, as_json: bool) -> None:
    from dataclasses import asdict

    from unirl.core.cli.output import print_json, print_table

    from .claims import all_claims

    claims = all_claims()
    if as_json:
        print_json([{**asdict(one), "proves": [cap.value for cap in one.proves]} for one in claims])
        return
    rows = [
        {"subject": one.kind, "claim": one.name, "proves": ", ".join(one.proves), "meaning": one.meaning}
        for one in claims
    ]
    print_table(rows, columns=["subject", "claim", "proves", "meaning"])
