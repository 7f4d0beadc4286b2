"""Mutants: parts broken on purpose, each in one way, to show that a claim can fail.

A mutant is a healthy part with one difference: in its spec, in the arguments it is built with, in what is done to it
after it is built, or in what its methods do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

from unirl.conformance.claims import SUBJECT_KINDS, SubjectKind
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.hookspec import hookimpl

from conformance_mutants.changes import Change, changed

KINDS: tuple[SubjectKind, ...] = tuple(
    kind for kind in SUBJECT_KINDS if Path(__file__).with_name(f"{kind}.py").exists()
)
"""Each has a module of this package with `MUTANTS`, and `catalog()` with these and healthy parts."""


CATALOGS: dict[SubjectKind, tuple[str, ...]] = {
    # Engines that are started once for many claims have a separate catalog.
    "engine": ("engine:catalog", "engine_apart_broken:catalog", "engine_media:catalog", "engine_stages:catalog"),
    # In one catalog two broken parts would meet in a cell.
    "cell": ("cell:catalog", "cell:catalog_of_lagged", "cell_text:broken_engines", "cell_text:broken_backends"),
}
"""Kinds with other catalogs than `catalog()` of their module."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    claim: str
    """The claim that must fail."""
    name: str
    """Name of the broken part (or dist), unique in its catalog."""
    breaks: str
    """Its defect in a few words: "rounds the sigmas to bf16"."""
    also: tuple[str, ...] = ()
    """Claims that necessarily fail with it; every other claim must still hold."""
    spec: Any = None
    """Spec of the healthy part that it is made of."""
    arguments: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    """Argument of the healthy part's `build`, such as `config` -> function of the value that changes it."""
    after_build: Callable[[Any], object] | None = None
    """Called with the part before its methods are changed."""
    changes: Mapping[str, Change] = field(default_factory=dict)
    """Method of the part -> function that replaces it."""

    def build(self, config: Any, **context: Any) -> Any:
        """The broken part."""
        arguments = {"config": replace(config, use=self.spec.name), **context}
        arguments |= {name: change(arguments[name]) for name, change in self.arguments.items() if name in arguments}
        part = resolve_name(self.spec.build)(arguments.pop("config"), **arguments)
        if self.after_build is not None:
            self.after_build(part)
        return changed(part, self.changes)


def builder(mutants: Sequence[Mutant]) -> Callable[..., Any]:
    """The `build` of all specs in `specs`: makes the mutant named by the config's `use`."""
    by_name = {mutant.name: mutant for mutant in mutants}
    return lambda config, **context: by_name[config.use].build(config, **context)


def specs(mutants: Sequence[Mutant], *, module: str) -> list[Any]:
    """Specs of the mutants. module: has their `builder` as `build`."""
    return [replace(mutant.spec, name=mutant.name, build=f"{module}:build") for mutant in mutants]


def plugin(**specs: Sequence[Any]) -> SimpleNamespace:
    """A plugin with these parts: `plugin(models=[SPEC])`."""
    return SimpleNamespace(**{f"unirl_{kind}": hookimpl(lambda own=own: own) for kind, own in specs.items()})


def catalog_of(healthy: SimpleNamespace, *others: Any, **broken: Sequence[Any]) -> Catalog:
    """A catalog of these plugins, and one more with the specs of broken parts."""
    named = {other.__name__: other for other in others}
    return Catalog.of({"unirl-healthy": healthy, "unirl-mutants": plugin(**broken), **named})


def catalogs_of(kind: SubjectKind) -> list[str]:
    """`"module:function"` of the catalogs that hold the mutants of a kind."""
    return [f"{__package__}.{name}" for name in CATALOGS.get(kind, (f"{kind}:catalog",))]


def mutants_of(kind: SubjectKind) -> list[Mutant]:
    """All mutants of a kind."""
    modules = dict.fromkeys(name.partition(":")[0] for name in catalogs_of(kind))
    return [mutant for module in modules for mutant in import_module(module).MUTANTS]
