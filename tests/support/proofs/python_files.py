"""What stands in a Python file and may lead to another one."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from unirl.conformance.source_hash import source_digest

__all__ = ["Reads", "read"]


@dataclass(frozen=True, kw_only=True)
class Reads:
    """What stands in a Python file."""

    digest: str
    imports: frozenset[str] = frozenset()
    """Absolute names; of `from a import b` both `a` and `a.b`."""
    strings: frozenset[str] = frozenset()
    """`*` stands for what an f-string fills in."""
    attributes: frozenset[str] = frozenset()
    settings: frozenset[str] = frozenset()
    """Of the strings those that are passed as `config` or `environment`."""


def read(source: str, *, name: str, package: list[str]) -> Reads:
    """name: dotted, of the module.  package: that it is in, or is."""
    tree = ast.parse(source)
    known = {"__package__": ".".join(package), "__name__": name, **dict(_named_strings(tree))}
    seen = _Seen(package=package, known=known)
    seen.look(tree)
    return Reads(
        digest=source_digest(source),
        imports=frozenset(seen.imports),
        strings=frozenset(seen.strings),
        attributes=frozenset(seen.attributes),
        settings=frozenset(seen.settings),
    )


@dataclass(kw_only=True)
class _Seen:
    """What runs in a module and may lead to another file."""

    package: list[str]
    known: Mapping[str, str]
    """Names of the module whose value is one string."""
    imports: set[str] = field(default_factory=set)
    strings: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    settings: set[str] = field(default_factory=set)

    def look(self, node: ast.AST) -> None:
        match node:
            case ast.If(test=test) if "TYPE_CHECKING" in ast.unparse(test):
                children: Iterable[ast.AST] = node.orelse
            case ast.Expr(value=ast.Constant(value=str())):
                return
            case ast.Import(names=names):
                self.imports.update(alias.name for alias in names)
                return
            case ast.ImportFrom(module=module, names=names, level=level):
                above = self.package[: len(self.package) - level + 1]
                base = [*above, *([module] if module else [])] if level else [module or ""]
                self.imports.add(".".join(base))
                self.imports.update(".".join([*base, alias.name]) for alias in names)
                return
            case ast.keyword(arg="config" | "environment", value=ast.Constant(value=str()) | ast.JoinedStr() as value):
                self.settings.add(self._text(value))
                children = [value]
            case ast.JoinedStr(values=values):
                self.strings.add(self._text(node))
                children = values
            case ast.Constant(value=str(text)):
                self.strings.add(text)
                return
            case ast.Attribute(attr=attr):
                self.attributes.add(attr)
                children = ast.iter_child_nodes(node)
            case ast.Call(func=ast.Attribute(attr=attr)):
                self.attributes.add(f"{attr}()")
                children = ast.iter_child_nodes(node)
            case _:
                children = ast.iter_child_nodes(node)
        for child in children:
            self.look(child)

    def _text(self, value: ast.expr) -> str:
        match value:
            case ast.Constant(value=str(text)):
                return text
            case ast.JoinedStr(values=values):
                return "".join(map(self._text, values))
            case ast.FormattedValue(value=ast.Name(id=name)):
                return self.known.get(name, "*")
            case _:
                return "*"


def _named_strings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Names that a module gives to strings."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))):
                yield name, text
            case _:
                pass
