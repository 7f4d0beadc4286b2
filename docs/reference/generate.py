"""Write the reference pages from the code that they describe: `python docs/reference/generate.py [--check]`.

Fields are documented after the field, so their text is read from the source. `--check` writes nothing and ends with 1
when a page is stale.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import itertools
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from unirl.core import config as schema
from unirl.core.capability import Cap, Needs, Support
from unirl.core.catalog import Catalog
from unirl.core.cli import cli as main_group
from unirl.core.hookspec import HookSpecs
from unirl.core.spec import KINDS, AlgorithmSpec, EngineSpec, ModelSpec, RewardSpec, Spec

HERE = Path(__file__).parent
HEADER = "<!-- Written by docs/reference/generate.py; change the code instead. -->\n\n"
SECTIONS = {
    "run": schema.RunConfig,
    "data": schema.DataConfig,
    "sampling": schema.LatentSamplingConfig,
    "sampling.schedule": schema.ScheduleConfig,
    "sampling.sde": schema.SdeStepsConfig,
    "advantage": schema.AdvantageConfig,
    "train": schema.TrainConfig,
    "eval": schema.EvalConfig,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say which pages are stale")
    check = parser.parse_args().check
    catalog = Catalog.discover()
    pages = {
        "recipe.md": recipe_page(),
        "parts.md": parts_page(catalog),
        "capabilities.md": capabilities_page(catalog),
        "hooks.md": hooks_page(),
        "cli.md": cli_page(),
    }
    stale = [name for name, text in pages.items() if not (HERE / name).is_file() or (HERE / name).read_text() != text]
    if check:
        if stale:
            sys.exit(f"stale: {', '.join(stale)}; run `python docs/reference/generate.py`.")
        return
    for name in stale:
        (HERE / name).write_text(pages[name], encoding="utf-8")
        print(f"wrote {name}")


def recipe_page() -> str:
    lines = [
        "# The recipe\n",
        "Sections that belong to no part. What a part takes is in [parts](parts.md). Any value can be set on the",
        "command line, the Hydra way: `unirl train quickstart run.steps=10`.\n",
    ]
    for section, cls in SECTIONS.items():
        lines += [f"## {section}\n", *config_table(cls, prefix=section), ""]
    return HEADER + "\n".join(lines)


def parts_page(catalog: Catalog) -> str:
    lines = ["# Parts\n", "Every part of this repository, with its settings.\n"]
    for kind in KINDS:
        for name in catalog.names(kind):
            found = catalog.get(kind, name)
            lines += [f"## {kind}: {name}\n", f"{found.spec.summary.rstrip('.')}. `pip install {found.dist}`\n"]
            lines += [*facts(found.spec), ""]
            cls = catalog.resolve(found.spec.config)
            prefix = kind if kind not in ("reward", "tracker") else f"{kind}.{name}"
            lines += [*config_table(cls, prefix=prefix), ""]
    return HEADER + "\n".join(lines)


def capabilities_page(catalog: Catalog) -> str:
    text = documented(Cap)
    lines = [
        "# Capabilities\n",
        "What parts state of themselves. An algorithm's needs are matched with these before anything starts.\n",
    ]
    lines += ["| capability | what it promises |", "| --- | --- |"]
    lines += [f"| `{cap.value}` | {text[cap.name]} |" for cap in Cap]
    for kind in ("model", "engine", "backend"):
        names = catalog.names(kind)
        specs = [catalog.get(kind, name).spec for name in names]
        stated = [cap for cap in Cap if any(spec.support(cap) is not Support.UNKNOWN for spec in specs)]
        lines += [f"\n## Every {kind}\n", f"| capability | {' | '.join(names)} |", f"| --- |{' --- |' * len(names)}"]
        lines += [f"| `{cap.value}` | {' | '.join(spec.support(cap).value for spec in specs)} |" for cap in stated]
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
        "A plugin implements those that it needs in its `plugin.py`, decorated with `unirl.core.hookspec.hookimpl`.\n",
    ]
    for name, hook in inspect.getmembers(HookSpecs, inspect.isfunction):
        if name.startswith("unirl_"):
            arguments = ", ".join(p for p in inspect.signature(hook).parameters if p != "self")
            lines += [f"## `{name}({arguments})`\n", f"{inspect.getdoc(hook)}\n"]
    return HEADER + "\n".join(lines)


def cli_page() -> str:
    lines = ["# The command line\n"]
    context = click.Context(main_group, info_name="unirl")
    lines += ["```text", main_group.get_help(context), "```\n"]
    for name in main_group.list_commands(context):
        command = main_group.get_command(context, name)
        assert command is not None
        lines += [f"## unirl {name}\n", "```text"]
        lines += [command.get_help(click.Context(command, info_name=name, parent=context)), "```\n"]
    return HEADER + "\n".join(lines)


def facts(spec: Spec) -> Iterator[str]:
    if isinstance(spec, ModelSpec):
        tracks = ", ".join(f"{name} ({kind})" for name, kind in spec.tracks.items())
        yield f"- Tracks: {tracks}. Trains `{spec.trainable}`, wrapped by {', '.join(spec.wrap_blocks)}."
        yield f"- LoRA targets: {', '.join(f'`{target}`' for target in spec.lora_targets)}."
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
    yield "| key | default | what |"
    yield "| --- | --- | --- |"
    yield from _rows(cls, prefix)


def _rows(cls: type[Any], prefix: str) -> Iterator[str]:
    text = documented(cls)
    for item in dataclasses.fields(cls):
        if (
            item.name in ("use", "kind")
            and cls is not schema.PartConfig
            and prefix.count(".") <= 1
            and item.name == "use"
        ):
            continue
        default = item.default if item.default is not dataclasses.MISSING else None
        if item.default_factory is not dataclasses.MISSING:
            default = item.default_factory()
        if dataclasses.is_dataclass(default) and f"{prefix}.{item.name}" not in SECTIONS:
            yield from _rows(type(default), f"{prefix}.{item.name}")
        elif not dataclasses.is_dataclass(default):
            shown = "required" if default == "???" else f"`{_yaml(default)}`"
            yield f"| `{prefix}.{item.name}` | {shown} | {text.get(item.name, '')} |"


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if value == "" else str(value)


def documented(cls: type[Any]) -> dict[str, str]:
    """Name -> the text that stands after each field of a class and of those it inherits from."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("unirl."):
            module = importlib.import_module(base.__module__)
            tree = ast.parse(textwrap.dedent(inspect.getsource(module)))
            body = next(n.body for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == base.__name__)
            for field, after in itertools.pairwise(body):
                name = field.target if isinstance(field, ast.AnnAssign) else getattr(field, "targets", [None])[0]
                is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                if isinstance(name, ast.Name) and is_text:
                    found[name.id] = " ".join(str(after.value.value).split()).replace("|", "\\|")  # type: ignore[attr-defined]
    return found


if __name__ == "__main__":
    main()
