"""`unirl doctor`: check this installation."""

from __future__ import annotations

import click

__all__ = ["command"]


@click.command("doctor", short_help="Check this installation, and the machines of a cluster.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option(
    "--cluster",
    is_flag=False,
    flag_value="auto",
    metavar="[ADDRESS]",
    help="Also check every machine of a cluster: the one running here, or the one at host:port.",
)
@click.pass_context
def command(ctx: click.Context, as_json: bool, cluster: str | None) -> None:
    """Check this installation: torch, plugins, namespaces, installed files, version bounds, disk, environments of
    engines. Exit codes: 0 no problems, 1 a problem, 3 a plugin failed to load."""
    import dataclasses

    from unirl.core.cli.discovery import discover
    from unirl.core.cli.output import console, print_json, print_table

    from .doctor import diagnose, look_at_cluster

    catalog = discover()
    diagnosis = diagnose(catalog)
    if cluster is not None:
        there = look_at_cluster(catalog, cluster)
        diagnosis = dataclasses.replace(
            diagnosis,
            facts={**diagnosis.facts, "machines": there.machines},
            findings=(*diagnosis.findings, *there.findings),
        )
    findings = [{"check": finding.check, "text": finding.text} for finding in diagnosis.findings]
    if as_json:
        print_json({**diagnosis.facts, "findings": findings, "exit_code": diagnosis.exit_code})
        ctx.exit(diagnosis.exit_code)
    facts, out = diagnosis.facts, console()
    torch = facts["torch"]
    devices = ", ".join(torch.get("devices", ())) or f"CPU, {torch.get('threads', '?')} threads"
    disk = facts["disk"]
    lines = {
        "python": f"{facts['python']['version']}  {facts['python']['executable']}",
        "platform": f"{facts['platform']['system']}, {facts['platform']['cpus']} CPUs",
        "torch": f"{torch['version']}  {devices}" if torch["version"] else "not installed",
        "packages": ", ".join(f"{name} {version}" for name, version in facts["dists"].items()),
        "disk": f"{disk['free_bytes'] / 2**30:.1f} GiB free in {disk['folder']}",
    }
    for name, text in lines.items():
        out.print(f"{name:<10}{text}", soft_wrap=True, markup=False)
    out.print()
    print_table(facts["plugins"], columns=["name", "dist", "version", "status"])
    out.print()
    if facts["environments"]:
        print_table(facts["environments"], columns=["engine", "accel", "state"])
        out.print()
    if cluster is not None:
        columns = ["name", "address", "python", "cpus", "gpus", "port"]
        print_table([{key: str(machine[key]) for key in columns} for machine in facts["machines"]], columns=columns)
        out.print()
    for finding in findings:
        out.print(f"{finding['check']:<10}{finding['text']}", soft_wrap=True, markup=False)
    if not findings:
        out.print("No problems found.")
    ctx.exit(diagnosis.exit_code)
