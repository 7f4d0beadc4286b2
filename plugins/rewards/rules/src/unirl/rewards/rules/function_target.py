"""Where a function is: `file.py:name` or `package.module:name`. Standard library only, and nothing is executed."""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.machinery import PathFinder
from pathlib import Path

__all__ = ["FORMS", "MEDIA", "Target", "is_defined", "problems", "required_columns"]

FORMS = "`file.py:function` or `package.module:function`"
MEDIA = {"image": "images", "video": "videos", "text": "completions"}
"""Medium -> the keyword under which a function gets it."""


@dataclass(frozen=True)
class Target:
    module: str
    """A file, or a module that can be imported."""
    name: str

    @classmethod
    def of(cls, text: str) -> Target:
        """Raises ValueError for another form."""
        module, colon, name = text.rpartition(":")
        if not (colon and module and name.isidentifier()):
            raise ValueError(f"got {text!r}, expected {FORMS}.")
        return cls(module, name)

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"

    @property
    def is_file(self) -> bool:
        return self.module.endswith(".py")

    @property
    def file(self) -> Path | None:
        """The source file; None for a module whose source is not found without importing its package."""
        if self.is_file:
            return Path(self.module)
        first, *others = self.module.split(".")
        try:
            spec = importlib.util.find_spec(first)
        except ValueError:  # a module that was set up without a spec, such as `__main__`
            return None
        name = first
        for part in others:
            if spec is None or spec.submodule_search_locations is None:
                return None
            name = f"{name}.{part}"
            # `importlib.util.find_spec` would import the package.
            spec = PathFinder.find_spec(name, spec.submodule_search_locations)
        if spec is None or not (spec.origin or "").endswith(".py"):
            return None
        return Path(str(spec.origin))


def problems(target: Target, *, medium: str) -> list[str]:
    """Problems that show without running anything: a missing file or function, or parameters of another medium.

    medium: `image`, `video` or `text`. A module whose file is not found is left to its import.
    """
    file = target.file
    if file is None:
        return []
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except OSError as error:
        return [f"{file} cannot be read ({error.strerror}). A relative path starts at the current folder."]
    except (SyntaxError, ValueError) as error:
        line = error.lineno if isinstance(error, SyntaxError) else None
        return [f"{file}{f':{line}' if line else ''} is not valid Python: {getattr(error, 'msg', error)}."]
    functions = _functions(tree)
    function = functions.get(target.name)
    if function is not None:
        return _signature(function, f"{target.name} ({file}:{function.lineno})", medium)
    # Imported, assigned or defined under a condition: known when the file is run.
    if any(isinstance(node, ast.Name) and node.id == target.name for node in ast.walk(tree)) or any(
        (alias.asname or alias.name) in (target.name, "*")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom | ast.Import)
        for alias in node.names
    ):
        return []
    nearest = get_close_matches(target.name, functions, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else f"; it has {', '.join(sorted(functions)) or 'none'}."
    return [f"{file} has no function {target.name!r}{hint}"]


def required_columns(target: Target) -> list[str]:
    """Metadata keys that the function cannot do without: its other parameters that have no default.

    Nothing is executed: empty where the function is not found so, or has decorators, which may change its parameters.
    """
    file = target.file
    try:
        function = _functions(ast.parse(file.read_bytes())).get(target.name) if file else None
    except (OSError, SyntaxError, ValueError):
        return []  # `problems` names it
    if function is None or function.decorator_list:
        return []
    return [name for name in _required(function.args) if name not in ("prompts", *MEDIA.values())]


def is_defined(target: Target) -> bool:
    """Whether its module defines the function: one that it imports may be any other. Nothing is executed."""
    try:
        return target.file is not None and target.name in _functions(ast.parse(target.file.read_bytes()))
    except (OSError, SyntaxError, ValueError):
        return False


def _functions(tree: ast.Module) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    return {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


def _required(arguments: ast.arguments) -> list[str]:
    """Parameters without a default, in their order."""
    plain = arguments.args[: len(arguments.args) - len(arguments.defaults)]
    named = [a for a, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if value is None]
    return [argument.arg for argument in (*plain, *named)]


def _signature(function: ast.FunctionDef | ast.AsyncFunctionDef, called: str, medium: str) -> list[str]:
    if isinstance(function, ast.AsyncFunctionDef):
        return [f"{called} is async; expected a plain function. Wrap it: `return asyncio.run(...)`."]
    if function.args.posonlyargs:
        return [f"{called} has positional-only parameters; every argument is passed by its name."]
    required = _required(function.args)
    return [
        f"{called} takes {name!r}; this recipe generates {MEDIA[medium]!r}."
        for name in sorted(set(MEDIA.values()) - {MEDIA[medium]})
        if name in required
    ]
