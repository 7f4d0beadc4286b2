"""Requirements for listing a plugin in the registry, and the lines to add for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from email.utils import getaddresses
from importlib.metadata import Distribution
from pathlib import Path

from packaging.requirements import Requirement
from unirl.conformance.report.file import load
from unirl.core.names import canonical
from unirl.core.plugins.catalog import Catalog, PluginRecord
from unirl.core.plugins.installed_files import damaged_files, shared_files
from unirl.core.plugins.registry import Registry, known_parts

__all__ = ["entries", "problems", "report_problems"]

LONGEST_SUMMARY = 100
"""Characters of a summary in the registry, with its full stop."""


def problems(dist: Distribution, *, catalog: Catalog, registry: Registry | None = None) -> Iterator[str]:
    """A sentence for each reason why the parts of an installed dist cannot be listed yet."""
    registry = known_parts() if registry is None else registry
    if _is_editable(dist):
        yield (
            f"{dist.name} is installed in editable mode, which says nothing about the files of its wheel. Build it and "
            "install that: `uv build`, `pip install --force-reinstall --no-deps dist/*.whl`."
        )
    records = _records(dist, catalog)
    if not records:
        yield (
            f"{dist.name} has no plugin: its pyproject.toml needs an entry point of the group `unirl.v1` that names "
            "the module with the hooks."
        )
    for record in records:
        if record.status != "loaded":
            yield f"The plugin {record.name!r} is {record.status}: {record.error}"
        elif not record.specs:
            yield f"The plugin {record.name!r} has no parts."
        yield from (f"{sentence}." for sentence in record.conflicts)
        for spec in record.specs:
            known = registry.part(spec.kind, spec.name)
            if known is not None and canonical(known.dist) != canonical(dist.name):
                yield f"The {spec.kind} {spec.name!r} is that of {known.dist} in the registry. Choose another name."
            if len(_summary(spec.summary)) > LONGEST_SUMMARY:
                yield (
                    f"The summary of the {spec.kind} {spec.name!r} has {len(_summary(spec.summary))} characters with "
                    f"its full stop, expected at most {LONGEST_SUMMARY}."
                )
    if bad := damaged_files(dist):
        yield f"Files are not those that its record lists: {', '.join(bad)}. Reinstall the wheel."
    for other, files in shared_files(dist).items():
        yield f"{other} has files of the same names: {', '.join(files)}. Move them into a package of your own."
    yield from _metadata_problems(dist)


def entries(dist: Distribution, *, catalog: Catalog) -> dict[str, list[str]]:
    """Kind -> the registry's lines for the parts of a dist without problems."""
    tables: dict[str, list[str]] = {}
    for record in _records(dist, catalog):
        for spec in record.specs:
            values = {
                "dist": canonical(dist.name),
                "by": _maker(dist),
                "home": _home(dist),
                "summary": _summary(spec.summary),
            }
            # A JSON string is a TOML string.
            written = ", ".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items())
            tables.setdefault(spec.kind, []).append(f"{spec.name} = {{ {written} }}")
    return {kind: sorted(lines) for kind, lines in sorted(tables.items())}


def report_problems(dist: Distribution, file: Path) -> Iterator[str]:
    """A sentence for each reason why a `conformance.json` does not show that the claims about a dist hold."""
    report = load(file)
    name = canonical(dist.name)
    versions = {canonical(one): version for one, version in report.dists.items()}
    if versions.get(name) != dist.version:
        yield f"{file} is about {dist.name} {versions.get(name, 'that was not installed')}, not {dist.version}."
    if [canonical(one.removeprefix("--plugin=")) for one in report.selection] != [name]:
        yield (
            f"{file} is of a run with {' '.join(report.selection) or 'no selection'}, expected all of "
            f"`--plugin {dist.name}` and nothing else."
        )
    if report.tier == "static":
        yield f"{file} is of tier static, which runs nothing. Leave out `--tier`."
    if failed := sorted({one.claim for one in report.outcomes if one.state == "fail"}):
        yield f"Claims failed: {', '.join(failed)}."
    elif not report.count("pass"):
        yield f"{file}: no claim passed."


def _metadata_problems(dist: Distribution) -> Iterator[str]:
    metadata = dist.metadata
    if not _maker(dist):
        yield "Its metadata names no author or maintainer: `authors` in pyproject.toml."
    if not _home(dist):
        yield "Its metadata has no https home page: `Homepage` or `Repository` of [project.urls] in pyproject.toml."
    if not any(metadata.get_all(key) for key in ("License-Expression", "License", "License-File")):
        yield 'Its metadata has no licence: `license` in pyproject.toml, such as "Apache-2.0".'
    cores = [one for one in map(Requirement, dist.requires or ()) if canonical(one.name) == "unirl-core"]
    if not cores:
        yield "It does not depend on unirl-core, whose hooks its plugin implements."
    elif not any(one.operator in ("<", "<=", "==", "~=") for core in cores for one in core.specifier):
        yield f"It takes any later unirl-core ({cores[0]}). Bound it to the releases that you tested: `>=0.1,<0.2`."


def _records(dist: Distribution, catalog: Catalog) -> list[PluginRecord]:
    return [record for record in catalog.records if canonical(record.dist) == canonical(dist.name)]


def _summary(text: str) -> str:
    return f"{text.rstrip('.')}."


def _maker(dist: Distribution) -> str:
    """Names of the authors, else of the maintainers; an address where that is all."""
    for role in ("Author", "Maintainer"):
        addresses = getaddresses(dist.metadata.get_all(f"{role}-email") or [])
        names = [*(dist.metadata.get_all(role) or []), *(name or address for name, address in addresses)]
        # Some build backends give a name in both fields.
        if distinct := dict.fromkeys(name for name in names if name):
            return ", ".join(distinct)
    return ""


def _home(dist: Distribution) -> str:
    """The home page, else the repository, else any page of the project that has https."""
    urls = [line.partition(",")[::2] for line in dist.metadata.get_all("Project-URL") or []]
    urls += [("homepage", url) for url in dist.metadata.get_all("Home-page") or []]
    pages = {label.strip().lower(): url.strip() for label, url in urls if url.strip().startswith("https://")}
    return next((pages[label] for label in ("homepage", "repository", "source", *pages) if label in pages), "")


def _is_editable(dist: Distribution) -> bool:
    text = dist.read_text("direct_url.json")
    return bool(text) and bool(json.loads(text or "{}").get("dir_info", {}).get("editable"))
