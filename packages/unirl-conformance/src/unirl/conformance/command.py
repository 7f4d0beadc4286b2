"""`unirl conformance`: run the claims against installed parts, show the results, and write reports."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click
from click.core import ParameterSource
from unirl.core.cli.discovery import plugins_dir_option
from unirl.core.errors import RecipeError
from unirl.core.names import did_you_mean

from .claims import TIERS, Tier

if TYPE_CHECKING:
    from unirl.core.plugins.catalog import Catalog
    from unirl.core.specs.spec import Kind

    from .results import Report
    from .subjects import Selection, Subject

__all__ = ["conformance"]

SELECTABLE: tuple[Kind, ...] = (
    "model",
    "engine",
    "algorithm",
    "backend",
    "reward",
    "environment",
    "tracker",
    "launcher",
    "transport",
)


def _part_options(command: click.Command) -> click.Command:
    for kind in reversed(SELECTABLE):
        text = f"Test this {kind} and its combinations. Repeatable."
        command = click.option(f"--{kind}", multiple=True, metavar="NAME", help=text)(command)
    return command


@click.command(
    context_settings={"ignore_unknown_options": False}, short_help="Test the installed parts, claim by claim."
)
@plugins_dir_option
@click.option("--plugin", multiple=True, metavar="DIST", help="Test everything this dist provides.")
@click.option("--claim", multiple=True, metavar="CLAIM", help="Test only this claim.")
@click.option(
    "--without",
    multiple=True,
    metavar="KIND:SUBJECT|CLAIM",
    help="Skip subjects (engine:sglang+sd3, engine:*+wan22) or a claim.",
)
@click.option(
    "--tier",
    type=click.Choice(TIERS),
    default="tiny",
    show_default=True,
    help="static: build nothing. tiny: miniatures on the CPU. gpu: also on a GPU. full: also tests that take minutes, "
    "and every algorithm with every engine.",
)
@click.option("--batch-invariant", is_flag=True, help="Use batch-invariant numerics, like run.batch_invariant.")
@click.option(
    "--report", "folder", type=click.Path(path_type=Path, file_okay=False), help="Write all reports to this folder."
)
@click.option(
    "--diff",
    "old",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Show changes since this conformance.json; a regression counts as a failure.",
)
@click.option(
    "--from",
    "source",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Show this conformance.json instead of running anything.",
)
@click.option("--claims", "list_claims", is_flag=True, help="List the claims and their meaning.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.argument("pytest_args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def conformance(
    ctx: click.Context,
    plugin: tuple[str, ...],
    claim: tuple[str, ...],
    without: tuple[str, ...],
    tier: str,
    batch_invariant: bool,
    folder: Path | None,
    old: Path | None,
    source: Path | None,
    list_claims: bool,
    as_json: bool,
    pytest_args: tuple[str, ...],
    **parts: tuple[str, ...],
) -> None:
    """Test the installed parts: each claim on each part, and on each compatible combination.

    Pytest flags go after `--`, such as `-- -n 2` or `-- --tb=long -rA`.

    Exit codes: 0 success, 1 a claim failed, 2 usage error, 3 a plugin is missing or nothing could run.
    """
    if list_claims:
        _refuse_others(ctx, "--claims", allowed={"list_claims", "as_json"})
        _list(as_json=as_json)
        return
    from .report.diff import compare, print_diff
    from .report.file import load, to_json
    from .report.terminal import print_report
    from .run import Stopped
    from .subjects import Selection

    # Claims use miniatures: a look-up on the hub would wait, and warn.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if batch_invariant:
        from unirl.numerics.batch_invariant import set_variables

        # Before the claims load torch; workers inherit them.
        set_variables(os.environ)
    # Before anything runs: it may take minutes, and its reports may be written over this one.
    before = load(old) if old is not None else None
    left_out = ""
    if source is not None:
        _refuse_others(ctx, "--from", allowed={"source", "folder", "old", "as_json"})
        report = load(source)
    else:
        if pytest_args and not pytest_args[0].startswith("-"):
            raise click.UsageError(
                f"{pytest_args[0]!r} is not an option. Name parts by kind, such as --engine {pytest_args[0]}; flags "
                "of pytest go after `--`."
            )
        names: dict[Kind, tuple[str, ...]] = {kind: parts[kind] for kind in SELECTABLE if parts[kind]}
        selection = Selection(names=names, plugins=plugin, claims=claim, without=without)
        if folder is not None:
            pytest_args = (f"--junitxml={folder.resolve() / 'junit.xml'}", *pytest_args)
        try:
            # The output of pytest is progress; stdout has the report alone.
            with redirect_stdout(sys.stderr):
                report, left_out = _run(
                    selection, tier=cast(Tier, tier), batch_invariant=batch_invariant, pytest_args=("-v", *pytest_args)
                )
        except Stopped as stopped:
            if folder is not None:
                _write(stopped.report, folder, err=True)
            raise
    if as_json:
        click.echo(to_json(report), nl=False)
    else:
        print_report(report, left_out=left_out)
    code = report.exit_code
    if before is not None:
        diff = compare(before, report)
        print_diff(diff, stderr=as_json)
        code = 1 if diff.got_worse else code
    if folder is not None:
        _write(report, folder, err=as_json)
    ctx.exit(code)


_part_options(conformance)


def _write(report: Report, folder: Path, *, err: bool) -> None:
    """Write all reports and print their paths. err: print to stderr."""
    from .report.write import write_reports

    for path in write_reports(report, folder):
        click.echo(f"wrote {path}", err=err)


def _run(
    selection: Selection, *, tier: Tier, batch_invariant: bool, pytest_args: tuple[str, ...]
) -> tuple[Report, str]:
    """The report, and a sentence about what a higher tier would try of the selection."""
    from unirl.core.cli.discovery import discover

    from .claims import all_claims, claim_kinds
    from .run import run_suite
    from .subjects import devices_of, subjects

    # Before pytest starts, so that a wrong name has its own message and exit code.
    catalog = discover()
    selection.check(catalog)
    if tier != "static":
        _check_environments(selection.names.get("engine", ()), catalog, devices=devices_of(tier))
    kinds = claim_kinds()
    for name in selection.claims:
        if name not in kinds:
            hint = did_you_mean(name, kinds) or "; `unirl conformance --claims` lists them."
            raise RecipeError(f"--claim: there is no claim {name!r}{hint}")
    chosen = subjects(catalog, selection, tier=tier)
    report = run_suite(selection, tier=tier, batch_invariant=batch_invariant, pytest_args=pytest_args)
    if not report.outcomes and not report.untried:
        higher = [
            f"{one.name!r} is of tier {one.tier}"
            for one in all_claims([kinds[name] for name in selection.claims])
            if one.name in selection.claims and TIERS.index(one.tier) > TIERS.index(tier)
        ]
        raise RecipeError(
            f"conformance: nothing matches the selection at tier {tier}; no claim was tried."
            + "".join(f" Claim {text}." for text in higher)
        )
    return report, _left_out(chosen, subjects(catalog, selection, tier="full"), is_narrow=selection.is_narrow)


def _left_out(chosen: Collection[Subject], full: Collection[Subject], *, is_narrow: bool) -> str:
    """A sentence about combinations with engines that a higher tier would try; or nothing."""
    from unirl.core.specs.spec import EngineSpec

    there = {(subject.kind, subject.id) for subject in chosen}
    others = [one for one in full if one.device == "cpu" and (one.kind, one.id) not in there]
    specs = (part.spec for one in others for part in one.parts)
    engines = sorted(
        {spec.name for spec in specs if isinstance(spec, EngineSpec) and (spec.environment or not is_narrow)}
    )
    if not engines:
        return ""
    if is_narrow:
        return (
            f"Not tested: combinations with {', '.join(engines)}, which have to be started. `--tier full` tests them, "
            f"and all that takes minutes; `--engine {engines[0]}` tests that one."
        )
    return (
        f"Not tested: most combinations with {', '.join(engines)}; each was tested once with each model and once with "
        "each thing that algorithms need of it. `--tier full` tests all, and all that takes minutes."
    )


def _check_environments(engines: Collection[str], catalog: Catalog, *, devices: Collection[str]) -> None:
    """Raises PluginNotInstalled for an engine without an environment for any of these devices: nothing of the selection
    could be tried."""
    from unirl.core.errors import PluginNotInstalled
    from unirl.core.specs.spec import EngineSpec

    for name in engines:
        spec = catalog.get("engine", name).spec
        if not isinstance(spec, EngineSpec) or not spec.environment:
            continue
        environment = catalog.resolve(spec.environment)
        if not any(environment.is_present(device) for device in devices):
            commands = " or ".join(f"`{environment.command(device)}`" for device in devices)
            raise PluginNotInstalled(
                f"engine {name!r} needs its own environment, which does not exist. Create it: {commands}."
            )


def _refuse_others(ctx: click.Context, flag: str, *, allowed: Collection[str]) -> None:
    """Raises UsageError for an option beside `flag` that would not be honoured."""
    for param in ctx.command.params:
        name = param.name or ""
        if name in allowed or ctx.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        given = param.opts[0] if isinstance(param, click.Option) else "flags of pytest"
        raise click.UsageError(f"{flag} runs nothing, so {given} has no effect with it. Remove one of them.")


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
