"""What stands in a Python file and may lead to another one."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

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
    compared: frozenset[str] = frozenset()
    """Of the strings those that something is only compared with."""
    attributes: frozenset[str] = frozenset()
    settings: frozenset[str] = frozenset()
    """Of the strings those that are passed as `config` or `environment`."""
    begins: frozenset[str] = frozenset()
    """Of the strings those that may be a command: the first of a list or a call, or next to `unirl`."""
    commands: frozenset[str] = frozenset()
    """Of the imports those that only the function `unirl_commands` does."""
    parts: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    """Name -> the strings of the calls that pass it as `name`, and of what these refer to in the module."""


def read(source: str, *, name: str, package: list[str]) -> Reads:
    """name: dotted, of the module.  package: that it is in, or is."""
    tree = ast.parse(source)
    known = {"__package__": ".".join(package), "__name__": name, **dict(_named_strings(tree))}
    seen = _Seen(package=package, known=known)
    seen.look(tree)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "unirl_commands"]
    commands = _seen(functions, package, known).imports
    others = _seen([node for node in tree.body if node not in functions], package, known).imports
    return Reads(
        digest=source_digest(source),
        imports=frozenset(seen.imports),
        strings=frozenset(seen.strings | seen.compared),
        compared=frozenset(seen.compared - seen.strings),
        attributes=frozenset(seen.attributes),
        settings=frozenset(seen.settings),
        begins=frozenset(seen.begins),
        commands=frozenset(commands - others),
        parts={part: frozenset(_seen(nodes, package, known).strings) for part, nodes in _calls_by_name(tree).items()},
    )


def _seen(nodes: Iterable[ast.AST], package: list[str], known: Mapping[str, str]) -> _Seen:
    result = _Seen(package=package, known=known)
    for node in nodes:
        result.look(node)
    return result


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
    begins: set[str] = field(default_factory=set)
    compared: set[str] = field(default_factory=set)

    def look(self, node: ast.AST) -> None:
        match node:
            case ast.Call(args=words) | ast.List(elts=words) | ast.Tuple(elts=words):
                texts = [word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str)]
                pairs = pairwise(["unirl", *texts])
                self.begins.update(word for last, word in pairs if last in ("unirl", "unirl.core"))
            case _:
                pass
        match node:
            case ast.If(test=test) if "TYPE_CHECKING" in ast.unparse(test):
                children = list[ast.AST](node.orelse)
            case ast.Expr(value=ast.Constant(value=str())):
                return
            case ast.Compare(left=left, comparators=comparators):
                children = []
                for side in (left, *comparators):
                    if isinstance(side, ast.Constant) and isinstance(side.value, str):
                        self.compared.add(side.value)
                    else:
                        children.append(side)
            case ast.Call(func=ast.Name(id="one_of" | "package_folder")):
                # Choices of a setting; where a package lies.
                return
            case ast.Assign(targets=[ast.Name(id=name)]) if name.startswith("PRELOAD"):
                # What processes import ahead for speed decides nothing.
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
                children = [*values]
            case ast.Constant(value=str(text)):
                self.strings.add(text)
                return
            case ast.Attribute(attr=attr):
                self.attributes.add(attr)
                children = [*ast.iter_child_nodes(node)]
            case ast.Call(func=ast.Attribute(attr=attr)):
                self.attributes.add(f"{attr}()")
                children = [*ast.iter_child_nodes(node)]
            case _:
                children = [*ast.iter_child_nodes(node)]
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


def _calls_by_name(tree: ast.Module) -> dict[str, list[ast.AST]]:
    """The calls with one `name=`, each with the statements of the module that it refers to, directly or not."""
    given: dict[str, ast.stmt] = {}
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                given[name] = node
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                given[name] = node
            case _:
                pass
    result: dict[str, list[ast.AST]] = {}
    for call in ast.walk(tree):
        match call:
            case ast.Call(keywords=keywords):
                names = [word.value for word in keywords if word.arg == "name"]
            case _:
                continue
        match names:
            case [ast.Constant(value=str(name))]:
                result.setdefault(name, []).extend(_with_what_it_refers_to(call, given))
            case _:
                pass
    return result


def _with_what_it_refers_to(node: ast.AST, given: Mapping[str, ast.stmt]) -> list[ast.AST]:
    result, waiting = list[ast.AST](), [node]
    while waiting:
        one = waiting.pop()
        if one not in result:
            result.append(one)
            waiting += [given[n.id] for n in ast.walk(one) if isinstance(n, ast.Name) and n.id in given]
    return result
