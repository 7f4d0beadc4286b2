"""Everything that others write against has a text, and the reference pages have it."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from unirl.conformance.claims import all_claims
from unirl.conformance.documented import documented_fields, undocumented_fields
from unirl.core.cli import cli
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.hookspec import HookSpecs
from unirl.core.specs import config, part_config, spec
from unirl.core.specs.capability import Cap, Needs

REFERENCE = Path(__file__).parents[1] / "docs/reference"


@functools.cache
def pages() -> dict[str, str]:
    """Name -> Markdown of the pages that `docs/reference/generate.py` writes."""
    spec = importlib.util.spec_from_file_location("generate", REFERENCE / "generate.py")
    assert spec is not None and spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    return generate.pages(Catalog.discover())


def page(name: str) -> str:
    """A page of the reference, on one line, with the bars of its cells as they are in the code."""
    return " ".join(pages()[f"{name}.md"].replace("\\|", "|").split())


def test_links_of_the_pages_lead_somewhere_and_the_folder_lists_the_pages() -> None:
    listed = re.findall(r"^\| `(\w+\.md)` \|", (REFERENCE / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(pages())
    for name, text in pages().items():
        text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        for target, anchor in re.findall(r"\]\(([^)#]+)(?:#([^)]*))?\)", text):
            if "://" not in target and target not in pages():
                assert (REFERENCE / target).exists(), f"{name} links to {target}"
            elif target == "claims.md":
                assert f"### {anchor}\n" in pages()["claims.md"], f"{name} links to the claim {anchor}"


def public_classes(module: Any) -> list[type[Any]]:
    return [getattr(module, name) for name in module.__all__ if isinstance(getattr(module, name), type)]


HOOKS = [name for name, _ in inspect.getmembers(HookSpecs, inspect.isfunction) if name.startswith("unirl_")]
PARTS = Catalog.discover().parts()


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_says_what_it_is_for(name: str) -> None:
    text = inspect.getdoc(getattr(HookSpecs, name))
    assert text and len(text.split()) >= 4
    assert f"## `{name}(" in page("hooks") and " ".join(text.split()) in page("hooks")


def test_a_capability_says_what_it_promises() -> None:
    texts = documented_fields(Cap)
    assert [cap.name for cap in Cap if not texts.get(cap.name)] == []
    missing = [cap.value for cap in Cap if f"| `{cap.value}` | {texts[cap.name]} |" not in page("capabilities")]
    assert missing == []


def test_a_claim_is_explained_in_the_reference() -> None:
    text = page("claims")
    for claim in all_claims():
        where = f"### {claim.name} "
        assert where in text, f"{claim.name} is not in claims.md"
        section = text.partition(where)[2].partition("### ")[0]
        assert claim.meaning and claim.meaning in section
        assert claim.if_it_fails and claim.if_it_fails in section
        assert f"Tier `{claim.tier}`" in section
        assert all(f"`{cap.value}`" in section for cap in claim.proves)


def test_each_claim_has_a_mutant_in_the_reference() -> None:
    listed = set(re.findall(r"^\| \[([\w-]+)\]", pages()["mutants.md"], re.MULTILINE))
    assert listed == {claim.name for claim in all_claims()}


def commands(group: click.Group, words: str = "unirl") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group, info_name=words)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield f"{words} {name}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{words} {name}")


OURS = [
    (words, command)
    for words, command in commands(cli)
    if command.callback is not None and command.callback.__module__.startswith("unirl.")
]


@pytest.mark.parametrize(("words", "command"), OURS, ids=[words for words, _ in OURS])
def test_a_command_and_its_options_have_help(words: str, command: click.Command) -> None:
    assert command.help and len(command.help.split()) >= 4
    silent = [option.name for option in command.params if isinstance(option, click.Option) and not option.help]
    assert silent == [], f"{words}: options without help"
    section = page("cli").partition(f"## {words} ")[2].partition(" ## unirl")[0]
    assert " ".join(command.help.replace("\b", "").split()) in section
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            assert option.opts[-1] in section
            # Wrapped in the page at spaces and dashes, so compared without them.
            assert re.sub(r"[\s-]", "", option.help or "") in re.sub(r"[\s-]", "", section)


def test_the_commands_of_the_workspace_are_all_there() -> None:
    assert {"unirl train", "unirl conformance", "unirl new", "unirl report"} <= {words for words, _ in OURS}


@pytest.mark.parametrize("cls", [*public_classes(part_config), *public_classes(config)], ids=lambda cls: cls.__name__)
def test_a_setting_of_the_core_has_a_text(cls: type[Any]) -> None:
    assert list(undocumented_fields(cls)) == []


@pytest.mark.parametrize("found", PARTS, ids=[f"{result.spec.kind}-{result.spec.name}" for result in PARTS])
def test_a_setting_of_a_part_has_a_text_in_the_reference(found: Any) -> None:
    cls = Catalog.discover().resolve(found.spec.config)
    assert list(undocumented_fields(cls)) == []
    assert f"## {found.spec.kind}: {found.spec.name} " in page("parts")
    section = page("parts").partition(f"## {found.spec.kind}: {found.spec.name} ")[2].partition(" ## ")[0]
    texts = documented_fields(cls)
    for item in dataclasses.fields(cls):
        if item.name != "use" and not dataclasses.is_dataclass(item.type):
            held = item.default_factory is not dataclasses.MISSING and dataclasses.is_dataclass(item.default_factory())
            assert held or texts[item.name] in section, f"{item.name} is not in parts.md"


@pytest.mark.parametrize("cls", [*public_classes(spec), Needs], ids=lambda cls: cls.__name__)
def test_a_field_of_a_spec_has_a_text_in_the_reference(cls: type[Any]) -> None:
    texts = documented_fields(cls)
    names = [item.name for item in dataclasses.fields(cls)]
    assert [name for name in names if not texts.get(name)] == []
    assert [name for name in names if texts[name] not in page("specs")] == []


def test_the_sections_of_a_recipe_are_in_the_reference() -> None:
    text = page("recipe")
    for section in (config.RunConfig, config.DataConfig, config.AdvantageConfig, config.TrainConfig, config.EvalConfig):
        texts = documented_fields(section)
        missing = [item.name for item in dataclasses.fields(section) if texts[item.name] not in text]
        assert missing == [], section.__name__
