"""Write the reference pages from the code that they describe: `python docs/reference/generate.py [--into FOLDER]`.

Fields are documented after the field, so their text is read from the source. The pages are not committed; links in them
lead to files of the repository from `docs/reference`, where they are written by default.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from unirl.conformance.claims import SUBJECT_KINDS, all_claims
from unirl.conformance.documented import documented_fields
from unirl.core.cli import cli as main_group
from unirl.core.limits import limit_of
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.hookspec import HookSpecs
from unirl.core.plugins.registry import known_parts
from unirl.core.specs import config as schema
from unirl.core.specs import part_config
from unirl.core.specs import spec as specs
from unirl.core.specs.capability import Cap, Needs
from unirl.core.specs.spec import KINDS, AlgorithmSpec, EngineSpec, ModelSpec, RewardSpec, Spec
from unirl.core.types import sampling

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
HEADER = "<!-- Written by docs/reference/generate.py; change the code instead. -->\n\n"
SECTIONS = {
    "run": schema.RunConfig,
    "data": schema.DataConfig,
    "sampling": sampling.LatentSamplingConfig,
    "sampling.schedule": sampling.ScheduleConfig,
    "sampling.sde": sampling.SdeStepsConfig,
    "advantage": schema.AdvantageConfig,
    "train": schema.TrainConfig,
    "eval": schema.EvalConfig,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=HERE, metavar="FOLDER", help="where to write them")
    folder: Path = parser.parse_args().into
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages(Catalog.discover()).items():
        (folder / name).write_text(text, encoding="utf-8")
        print(f"wrote {folder / name}")


def pages(catalog: Catalog) -> dict[str, str]:
    """Name -> Markdown of every page."""
    return {
        "recipe.md": recipe_page(),
        "parts.md": parts_page(catalog),
        "capabilities.md": capabilities_page(catalog),
        "hooks.md": hooks_page(),
        "specs.md": specs_page(),
        "claims.md": claims_page(),
        "mutants.md": mutants_page(),
        "cli.md": cli_page(),
        "registry.md": registry_page(),
    }


def recipe_page() -> str:
    lines = [
        "# The recipe\n",
        "Sections that belong to no part. What a part takes is in [parts](parts.md). Any value can be set on the",
        "command line, the Hydra way: `unirl train quickstart run.max_steps=10`. Numbers must be finite everywhere.\n",
    ]
    for section, cls in SECTIONS.items():
        lines += [f"## {section}\n", *config_table(cls, prefix=section), ""]
    return HEADER + "\n".join(lines)


def parts_page(catalog: Catalog) -> str:
    lines = ["# Parts\n", "Every part of this repository, with its settings.\n"]
    for kind in KINDS:
        for name in catalog.names(kind):
            result = catalog.get(kind, name)
            lines += [f"## {kind}: {name}\n", f"{result.spec.summary.rstrip('.')}. `pip install {result.dist}`\n"]
            lines += [*facts(result.spec), ""]
            cls = catalog.resolve(result.spec.config)
            prefix = kind if kind not in ("reward", "tracker") else f"{kind}.{name}"
            lines += [*config_table(cls, prefix=prefix), ""]
            if isinstance(result.spec, specs.ModelSpec):
                for options in result.spec.options.values():
                    lines += [*config_table(catalog.resolve(options), prefix="sampling.options"), ""]
    return HEADER + "\n".join(lines)


def capabilities_page(catalog: Catalog) -> str:
    text = documented(Cap)
    lines = [
        "# Capabilities\n",
        "What parts provide. An algorithm's needs are matched with these before anything starts.\n",
    ]
    lines += ["| capability | what it promises |", "| --- | --- |"]
    lines += [f"| `{cap.value}` | {text[cap.name]} |" for cap in Cap]
    for kind in ("model", "engine", "backend"):
        names = catalog.names(kind)
        specs = [catalog.get(kind, name).spec for name in names]
        lines += [f"\n## Every {kind}\n", f"| capability | {' | '.join(names)} |", f"| --- |{' --- |' * len(names)}"]
        for cap in (cap for cap in Cap if kind in cap.kinds):
            lines.append(
                f"| `{cap.value}` | {' | '.join('yes' if cap in spec.capabilities else '' for spec in specs)} |"
            )
    needs = [field.name for field in dataclasses.fields(Needs)]
    algorithms = [catalog.get("algorithm", name).spec for name in catalog.names("algorithm")]
    lines += ["\n## What algorithms need\n", f"| algorithm | {' | '.join(needs)} |", f"| --- |{' --- |' * len(needs)}"]
    for spec in algorithms:
        assert isinstance(spec, AlgorithmSpec)
        lines.append(f"| {spec.name} | {' | '.join(str(getattr(spec.needs, name)) for name in needs)} |")
    return HEADER + "\n".join(lines) + "\n"


def hooks_page() -> str:
    lines = [
        "# Hooks\n",
        "A plugin implements those that it needs in its `plugin.py`, decorated with "
        "`unirl.core.plugins.hookspec.hookimpl`.\n",
    ]
    for name, hook in inspect.getmembers(HookSpecs, inspect.isfunction):
        if name.startswith("unirl_"):
            arguments = ", ".join(p for p in inspect.signature(hook).parameters if p != "self")
            lines += [f"## `{name}({arguments})`\n", f"{inspect.getdoc(hook)}\n"]
    return HEADER + "\n".join(lines)


def specs_page() -> str:
    lines = [
        "# Specs\n",
        "What a plugin says of each part that it provides. All fields are given by keyword.\n",
    ]
    classes = [specs.Spec, *(value for value in vars(specs).values() if is_spec(value)), specs.Miniature]
    for cls in [*classes, specs.RewardExample, specs.EnvironmentExample, specs.Gap, Needs]:
        own = set(documented(cls)) - (set(documented(specs.Spec)) if is_spec(cls) else set())
        if not own:
            continue
        lines += [f"## {cls.__name__}\n", f"{first_line(cls)}\n", "| field | default | what |", "| --- | --- | --- |"]
        lines += [row for item, row in spec_rows(cls) if item in own]
        lines.append("")
    return HEADER + "\n".join(lines)


def is_spec(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Spec) and value is not Spec


def first_line(cls: type[Any]) -> str:
    """First line of its docstring; that of a dataclass without one is its signature, which is left out."""
    text = (inspect.getdoc(cls) or "").split("\n")[0]
    if not text.startswith(f"{cls.__name__}("):
        return text
    return f"For parts of the kind {cls.kind}, besides the fields of `Spec`."


def spec_rows(cls: type[Any]) -> Iterator[tuple[str, str]]:
    """Each field and its row."""
    text = documented(cls)
    for item in dataclasses.fields(cls):
        default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        if default is dataclasses.MISSING:
            shown = "required"
        elif default in ((), {}, frozenset()):
            shown = "empty"
        else:
            is_plain = not isinstance(default, tuple) or not any(dataclasses.is_dataclass(one) for one in default)
            shown = f"`{default!r}`" if is_plain else ", ".join(f"`{type(one).__name__}()`" for one in default)
        yield item.name, f"| `{item.name}` | {shown} | {text.get(item.name, '')} |"


def claims_page() -> str:
    lines = [
        "# Claims\n",
        "What `unirl conformance` proves of parts, each on every part or combination that is installed.",
        "The [command line](cli.md) says how to run them. A claim that names capabilities is tried on parts that",
        "provide them. Tiers: `static` builds nothing, `tiny` runs miniatures on the CPU, `gpu` the same on a GPU as",
        "well, `full` takes minutes.\n",
    ]
    known = all_claims()
    for kind in SUBJECT_KINDS:
        lines.append(f"## {kind}\n")
        for claim in (one for one in known if one.kind == kind):
            proves = f"Proves {', '.join(f'`{cap.value}`' for cap in claim.proves)}. " if claim.proves else ""
            needs = "".join(
                f"Where the {other} has {', '.join(f'`{cap.value}`' for cap in caps)}. "
                for other, caps in claim.needs.items()
            )
            lines += [f"### {claim.name}\n", f"{proves}{needs}Tier `{claim.tier}`.\n", f"{claim.meaning}\n"]
            lines.append(f"*If it fails:* {claim.if_it_fails}\n")
    return HEADER + "\n".join(lines) + "\n"


def mutants_page() -> str:
    """For each claim the parts that show that it can fail, from the tests of conformance."""
    sys.path.insert(0, str(ROOT / "packages/unirl-conformance/tests"))
    from conformance_mutants.mutant import KINDS as MUTANT_KINDS
    from conformance_mutants.mutant import mutants_of

    lines = [
        "# Mutants\n",
        "A claim that cannot fail proves nothing. So each has at least one *mutant*: a part that is broken on purpose,",
        "in the one way the claim is about. `packages/unirl-conformance/tests/test_mutants.py` checks for each line",
        "that the claim fails, that those in the last column necessarily fail with it, and that no other claim does.\n",
    ]
    for kind in MUTANT_KINDS:
        mutants = sorted(mutants_of(kind), key=lambda one: (one.claim, one.name))
        lines += [f"## {kind}\n", f"{len({mutant.claim for mutant in mutants})} claims, {len(mutants)} mutants.\n"]
        lines += ["| claim | mutant: a part that ... | fails with it |", "| --- | --- | --- |"]
        for mutant in mutants:
            breaks = mutant.breaks.replace("|", "\\|")
            lines.append(f"| [{mutant.claim}](claims.md#{mutant.claim}) | {breaks} | {', '.join(mutant.also)} |")
        lines.append("")
    return HEADER + "\n".join(lines)


def cli_page() -> str:
    lines = ["# The command line\n"]
    # One width, whatever terminal this is run in.
    context = click.Context(main_group, info_name="unirl", terminal_width=100)
    lines += ["```text", main_group.get_help(context), "```\n"]
    for name, command, inner in commands(main_group, context):
        lines += [f"## unirl {name}\n", "```text", command.get_help(inner), "```\n"]
    return HEADER + "\n".join(lines)


def commands(group: click.Group, context: click.Context) -> Iterator[tuple[str, click.Command, click.Context]]:
    """Every command below a group: its words, itself, its context. Those of third parties are not ours to describe."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None and command.callback is not None
        if not command.callback.__module__.startswith("unirl."):
            continue
        inner = click.Context(command, info_name=name, parent=context)
        words = inner.command_path.removeprefix("unirl ")
        yield words, command, inner
        if isinstance(command, click.Group):
            yield from commands(command, inner)


def registry_page() -> str:
    lines = [
        "# The registry\n",
        "Parts that can be installed, and who maintains them. The list is",
        "[`registry/plugins.toml`](../../registry/plugins.toml);",
        "[how to get into it](../how-to/write-a-plugin.md#get-into-the-registry).\n",
    ]
    parts = known_parts().parts
    for kind in dict.fromkeys(part.kind for part in parts):
        lines += [f"## {kind}\n", "| name | what | by | install |", "| --- | --- | --- | --- |"]
        for part in parts:
            if part.kind == kind:
                maintainer = f"[{part.by}]({part.home})" if part.by else "UniRL"
                install = "planned" if part.planned else f"`pip install {part.dist}`"
                lines.append(f"| `{part.name}` | {part.summary} | {maintainer} | {install} |")
        lines.append("")
    return HEADER + "\n".join(lines)


def _names(fact: tuple[str, ...] | str) -> str:
    """Names that a spec states; else the function that finds them in the module."""
    if isinstance(fact, str):
        return f"those that `{fact}` finds"
    return ", ".join(f"`{name}`" for name in fact)


def facts(spec: Spec) -> Iterator[str]:
    if isinstance(spec, ModelSpec):
        tracks = ", ".join(f"{name} ({kind})" for name, kind in spec.tracks.items())
        yield f"- Tracks: {tracks}. Trains `{spec.trainable}`, wrapped by {_names(spec.wrap_blocks)}."
        yield f"- LoRA targets: {_names(spec.lora_targets)}."
        yield f"- Verified against {spec.reference}."
    elif isinstance(spec, EngineSpec):
        yield f"- Kernels: {', '.join(f'`{kernel}`' for kernel in spec.kernels)}."
    elif isinstance(spec, AlgorithmSpec) and spec.paper:
        yield f"- Source: {spec.paper}."
    elif isinstance(spec, RewardSpec):
        yield f"- Scores {spec.media}. Scale: {spec.scale}"
        if spec.metadata:
            yield f"- Reads metadata {', '.join(f'`{key}`' for key in spec.metadata)} of each prompt."


def config_table(cls: type[Any], *, prefix: str) -> Iterator[str]:
    yield "| key | default | takes | what |"
    yield "| --- | --- | --- | --- |"
    yield from _rows(cls, prefix)


def _rows(cls: type[Any], prefix: str) -> Iterator[str]:
    text = documented(cls)
    for item in dataclasses.fields(cls):
        if (
            item.name in ("use", "kind")
            and cls is not part_config.PartConfig
            and prefix.count(".") <= 1
            and item.name == "use"
        ):
            continue
        default = item.default if item.default is not dataclasses.MISSING else None
        if item.default_factory is not dataclasses.MISSING:
            default = item.default_factory()
        if dataclasses.is_dataclass(default) and f"{prefix}.{item.name}" not in SECTIONS:
            yield f"| `{prefix}.{item.name}` | | settings below | {text.get(item.name, '')} |"
            yield from _rows(type(default), f"{prefix}.{item.name}")
        elif not dataclasses.is_dataclass(default):
            shown = "required" if default == "???" else f"`{_yaml(default)}`"
            takes = _takes(cls, item)
            yield f"| `{prefix}.{item.name}` | {shown} | {takes} | {text.get(item.name, '')} |"


def _takes(cls: type[Any], item: dataclasses.Field[Any]) -> str:
    """The values that a field may have, where it declares them."""
    bounds = limit_of(cls, item.name)
    if bounds is None:
        return ""
    choices = ", ".join(f"`{choice}`" for choice in bounds.choices)
    return (choices or str(bounds)) + (", or null" if "None" in str(item.type) else "")


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if value == "" else str(value)


def documented(cls: type[Any]) -> dict[str, str]:
    """Name -> the text after each field of a class, as a cell of a table."""
    return {name: text.replace("|", "\\|") for name, text in documented_fields(cls).items()}


if __name__ == "__main__":
    main()
