"""`unirl compose`: the plan of a recipe, where each value came from, and whether its parts are compatible."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from .config_dump import dump_config, dump_options
from .discovery import allow_code_option, discover, plugins_dir_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..match.named_code import NamedCode
    from ..match.parts import Verdict
    from ..specs.plan import Origin, Plan
    from .preflight import Readiness

__all__ = ["command", "plan_json", "show_plan"]


@click.command("compose")
@click.argument("recipe")
@click.argument("overrides", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.option("--changed", is_flag=True, help="Show only values that are not defaults.")
@plugins_dir_option
@allow_code_option
@dump_options
@click.pass_context
def command(
    ctx: click.Context, recipe: str, overrides: tuple[str, ...], as_json: bool, changed: bool, **dump: Any
) -> None:
    """Show the plan of RECIPE with these OVERRIDES: parts, values and their origins, and whether it is accepted.

    RECIPE is a name listed by `unirl recipes`, or a path that ends in .yaml. OVERRIDES use Hydra's syntax:
    `engine=sglang` chooses a part, `algorithm.clip_range=1e-4` sets a value, `+reward@reward.jpeg=jpeg-size` adds a
    reward. Also checks what can be checked without loading anything, such as data and engine environments.
    Exits with 1 if the plan is refused. With --json, an error is printed as JSON too: `{"error": ...}`.
    """
    from ..match.match import match
    from ..match.named_code import named_code
    from ..recipe.compose import compose
    from .output import print_json
    from .preflight import preflight

    catalog = discover()
    if dump_config(recipe, overrides, catalog=catalog, **dump):
        return
    plan = compose(recipe, overrides, catalog=catalog)
    code = named_code(plan, catalog=catalog)
    verdict = match(plan, catalog=catalog)
    # Checks of this machine rely on settings that the match has accepted.
    readiness = preflight(plan, catalog=catalog) if verdict.accepted else None
    if as_json:
        here = None if readiness is None else {name: list(values) for name, values in vars(readiness).items()}
        print_json({**plan_json(plan, verdict), "code": [vars(one) for one in code], "here": here})
    else:
        show_plan(plan, verdict, readiness, code, changed=changed)
    ctx.exit(0 if verdict.accepted else 1)


def plan_json(plan: Plan, verdict: Verdict) -> dict[str, Any]:
    """The plan as plain data."""
    from ..match.acceleration import accelerations
    from ..observe.stages import stage_facts
    from ..specs.leaves import leaves

    return {
        "recipe": plan.recipe,
        "hash": plan.hash,
        "accepted": verdict.accepted,
        "reasons": [{"key": reason.key, "text": reason.text} for reason in verdict.reasons],
        "left_out": [str(value) for value in plan.left_out],
        "parts": [
            {"key": part.key, "kind": part.spec.kind, "name": part.name, "dist": part.dist, "version": part.version}
            for part in plan.choices
        ],
        "stages": [
            {**facts, "parts": {kind: part.key for kind, part in stage.parts.items()}}
            for facts, stage in zip(stage_facts(plan), plan.stages, strict=True)
        ],
        "accelerations": [
            {
                "key": one.key,
                "value": one.value,
                "scope": one.scope,
                "loss": one.loss,
                # JSON has no infinity.
                "error": None if one.loss == "unbounded" else one.error,
            }
            for one in accelerations(plan)
        ],
        "resolved": plan.resolved,
        "origins": {
            path: {"source": plan.origins[path].source, "detail": plan.origins[path].detail}
            for path in leaves(plan.resolved)
        },
    }


def show_plan(
    plan: Plan, verdict: Verdict, readiness: Readiness | None, code: Sequence[NamedCode], *, changed: bool
) -> None:
    """Print the plan as a table of values with their origins; defaults are dimmed or, with `changed`, omitted.

    readiness: None for a refused plan.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from ..match.acceleration import accelerations
    from ..specs.leaves import leaves
    from .output import console

    parts = {part.key: part for part in plan.choices}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in ("key", "value", "from"):
        table.add_column(column, overflow="fold")
    section = ""
    for path, value in leaves(plan.resolved).items():
        key = next((part for part in parts if path.startswith(f"{part}.")), path.split(".")[0])
        is_default = path != f"{key}.use" and plan.origins[path].source == "default"
        if changed and is_default:
            continue
        if key != section:
            section = key
            part = parts.get(key)
            name = f"{part.name}  ({part.dist} {part.version})" if part else ""
            table.add_row(Text(key, style="bold"), Text(name, style="bold"), _origin(plan.origins.get(f"{key}.use")))
        if path == f"{key}.use":
            continue
        origin = plan.origins[path]
        style = {"default": "dim", "command line": "yellow"}.get(origin.source, "")
        table.add_row(Text("  " + path, style=style), Text(_shown(value), style=style), _origin(origin))
    out = console()
    out.print(table)
    out.print()
    if len(plan.stages) > 1:
        out.print(_drawn(plan))
        out.print()
    out.print(f"recipe {plan.recipe}   hash {plan.hash}", soft_wrap=True)
    for one in accelerations(plan):
        text = f"faster or smaller: {one.key}={_shown(one.value)} in {one.where}, {one.effect}"
        out.print(Text(text, style="dim" if one.loss == "none" else ""), soft_wrap=True)
    for one in code:
        where = ", from outside the plugins and this folder" if one.is_foreign else ""
        out.print(Text(f"runs code: {one.key} is {one.code}{where}", style="yellow"), soft_wrap=True)
    for value in plan.left_out:
        out.print(Text(f"note: {value}", style="yellow"), soft_wrap=True)
    if readiness is not None:
        out.print(Text("accepted: these parts and settings work together", style="green"))
        for problem in readiness.problems:
            out.print(Text(f"not ready here: {problem}", style="yellow"), soft_wrap=True)
        out.print(Text(f"not looked at: {', '.join(readiness.unseen)}", style="dim"), soft_wrap=True)
    else:
        out.print(Text(f"refused, for {len(verdict.reasons)} reason{'s' * (len(verdict.reasons) > 1)}:", style="red"))
        for reason in verdict.reasons:
            out.print(Text(f"  {reason}"), soft_wrap=True)


def _drawn(plan: Plan) -> Any:
    """The stages as a tree, from the prompts down."""
    from rich.tree import Tree

    tree = Tree(f"{plan.data.prompts_per_step} prompts", guide_style="dim")
    nodes = {"": tree}
    for stage in plan.stages:
        trained = f"trains with {stage.algorithm.name}" if stage.algorithm is not None else "frozen"
        facts = [f"{stage.model.name} on {stage.engine.name}", trained]
        if stage.teachers:
            facts.append(f"KL to {' or '.join(teacher.name for teacher in stage.teachers)}")
        if stage.environment is not None:
            facts.append(f"talks with {stage.environment.name}")
        if stage.rewards:
            facts.append(f"scored by {', '.join(stage.rewards)}")
        if stage.settings.credit != "none":
            facts.append(f"{stage.settings.credit} credit to {stage.parent}")
        each = f"{stage.samples} of each {'sample' if stage.parent else 'prompt'}"
        label = f"{stage.name}: {stage.medium}, {each}; {'; '.join(facts)}"
        nodes[stage.name] = nodes[stage.parent or ""].add(label)
    return tree


def _shown(value: Any) -> str:
    """A value as one would write it in a recipe."""
    return value if isinstance(value, str) and value else json.dumps(value)


def _origin(origin: Origin | None) -> Any:
    from rich.text import Text

    if origin is None:
        return Text("")
    style = {"default": "dim", "command line": "yellow"}.get(origin.source, "cyan")
    return Text(str(origin), style=style)
