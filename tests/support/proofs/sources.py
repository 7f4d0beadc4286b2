"""What a test depends on, read from the sources of the workspace: files reached from it, and what is in them.

An edge leads from a Python file to

- every module that it imports, at the top or in a function, with the packages that hold it; what stands under
  TYPE_CHECKING does not run;
- every module that one of its strings names, such as `"unirl.models.sd3.model:build"`, with `*` for what an f-string
  fills in, unless it is a string that the module gives a name; a string that names a package of test modules names those;
- every file or folder that one of its strings names, from its own folder or from the root, when it is a test's; a
  pattern of paths, such as `docs/**/*.md`, names files from the root;
- the command line, where a string of a test is the name of a script;
- the dists that a string of a test names, as somebody installs them: README and all modules, and of the dists that come
  along because they are needed, README and what finding their plugins imports. A part of those that is used is named;
- the parts that it names. A part is built because somebody imports it or names it: so a string that equals the name of
  a part, in packages, and each word of a string, in tests and recipes, leads to the plugin with that part, and to what
  the call there names that describes it. The same goes for recipes; parts that a recipe overrides in the one that it
  extends do not count. Names that are everyday words, such as the reward `format`, count in tests only, as
  a whole string or as a value (`=format`, `reward: format`), and a dotted name, such as that of a module, names no part.
  In packages, these strings name no part either: choices of a setting, operands of a comparison, and in a dist the names
  of its own parts. A list `PRELOAD` of tests is imported early for speed and leads nowhere.
  Tests that discover what is installed and go through it (`.parts()`, `.specs()`, `.records`) lead to what finding all
  plugins imports;
- the modules of the commands of plugins that a test calls, `unirl export` or `main(["export"])`.

With a module of a dist go the dist's `pyproject.toml` and every file that it ships which is not Python: locks of
engines, recipes, templates, checkpoints. With a test goes each `conftest.py` above it, what else lies in its folder and
is not Python and, of a plugin's test, all of the plugin and what its recipes name.

Not followed is `Catalog.discover()`: it reads the light `plugin.py` of every dist that is installed, and one that is
broken does not hide the others (tests of the catalog show it), so parts that nobody names decide nothing.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from .dists import Dist, dotted, is_data, is_source
from .python_files import Reads, read
from .recipes import ASSET, NAMED, WORD, Recipe, read_recipe
from .tree import Tree

__all__ = ["Dist", "Node", "Workspace"]

MODULE = re.compile(r"[A-Za-z_*][\w*]*(\.[A-Za-z_*][\w*]*)*(:[\w.*-]+)?")
VALUE = re.compile(r"(?:^|[=,+]|: |--\w+ )([A-Za-z0-9][A-Za-z0-9_-]*)")
"""A word where the name of a part stands: all of a string or its beginning, or a value."""
COMMAND = re.compile(r"\bunirl ([a-z-]+)")
NAME_PACKAGES = {"unirl.conformance.environment", "unirl.conformance.fixtures.plugin", "unirl.runtime.doctor"}
"""Modules whose strings name packages of an index, which may be called as parts are."""
WRITTEN = {"proven.json", "durations.json"}
"""What the gate writes itself."""
WHOLE_CATALOG = {"parts()", "specs()", "records"}
"""What gives all that is in a catalog: two methods, and an attribute."""


@dataclass(frozen=True)
class Part:
    """One part of a plugin."""

    file: Path
    name: str


@dataclass(frozen=True)
class Base:
    """A recipe that another one extends, which chooses the parts of some groups itself."""

    file: Path
    overridden: frozenset[str]


Node = Path | Part | Base


@dataclass
class Workspace(Tree):
    """A checkout, as it is on disk now, and what its files lead to."""

    _reads: dict[Path, Reads] = field(default_factory=dict, repr=False)
    _recipes: dict[Path, Recipe] = field(default_factory=dict, repr=False)
    _digests: dict[Path, str] = field(default_factory=dict, repr=False)
    _edges: dict[Node, tuple[set[Path], set[Node], set[Path]]] = field(default_factory=dict, repr=False)
    _beside: dict[Path, dict[str, Path]] = field(default_factory=dict, repr=False)
    _tests: dict[Path, bool] = field(default_factory=dict, repr=False)
    _founds: dict[str, set[Path]] = field(default_factory=dict, repr=False)

    @cached_property
    def settings(self) -> set[Path]:
        """Modules of what can be set and of environments, as specs of plugins name them: `config=`, `environment=`."""
        plugins = [module for dist in self.dists for module in self.of_plugin(dist)]
        names = {text.partition(":")[0] for module in plugins for text in self._read(module).settings}
        return {self.modules[name] for name in names & self.modules.keys()}

    def reached(self, roots: Iterable[Node], *, follows: Callable[[Path], bool] = lambda path: True) -> set[Path]:
        """All files that decide what these do, themselves among them.

        follows: whether a file that only a string names, or a pattern, is meant.
        """
        result: set[Path] = set()
        waiting = [node for root in roots for node in (root, *self._around(_file(root)))]
        done: set[Node] = set()
        gate = f"{self.root / 'tests' / 'support' / 'proofs'}/"
        is_whole = False
        while waiting or not is_whole:
            if not waiting:
                is_whole = True
                if self._goes_through_a_catalog(result):
                    result.update(path for dist in self.dists for path in self._found(dist))
                continue
            node = waiting.pop()
            if node in done:
                continue
            done.add(node)
            path = _file(node)
            # The gate decides which tests run, not how they end.
            if path.name in WRITTEN or str(path).startswith(gate):
                continue
            result.add(path)
            dist = self.dist_of(path)
            if dist is not None:
                result.update(dist.data)
            if path.suffix == ".py":
                imported, named, ends = self._edges_of(node)
                waiting += [*imported, *(target for target in named if follows(_file(target)))]
                result.update(ends)
            elif path in self.recipes:
                waiting += self._of_recipe(path, node.overridden if isinstance(node, Base) else frozenset())
        return result

    def forget(self, path: Path) -> None:
        """Read a file again, which was written to."""
        for known in (self._reads, self._digests, self._recipes):
            known.pop(path, None)
        self._edges = {node: edges for node, edges in self._edges.items() if _file(node) != path}
        self._founds.clear()

    def _edges_of(self, node: Node) -> tuple[set[Path], set[Node], set[Path]]:
        """What it imports, what it names, and files that lead no further."""
        if node not in self._edges:
            path = _file(node)
            reads = self._read(path)
            imports, strings = reads.imports, reads.strings
            if isinstance(node, Part):
                imports, strings = imports - reads.commands, reads.parts[node.name]
            named = {*self._named(strings, path), *self._with_commands(reads.begins if self._is_test(path) else ())}
            self._edges[node] = self._imported(imports, path), named, set(self._along(path))
        return self._edges[node]

    def _goes_through_a_catalog(self, files: Iterable[Path]) -> bool:
        """Whether tests look at all that is installed."""
        tests = [self._read(path) for path in files if path.suffix == ".py" and self._is_test(path)]
        used = {attribute for reads in tests for attribute in reads.attributes}
        return "discover" in used and bool(used & WHOLE_CATALOG)

    def digest(self, path: Path, *, with_prose: bool = False) -> str:
        """Of the bytes of a file; without prose, of the code alone where it is Python."""
        if path.suffix == ".py" and not with_prose:
            return self._read(path).digest
        if path not in self._digests:
            self._digests[path] = hashlib.sha256(path.read_bytes()).hexdigest()
        return self._digests[path]

    def of_plugin(self, dist: Dist) -> Iterator[Path]:
        """The modules that its entry points name."""
        yield from (self.modules[name] for name in dist.entry_points)

    def _around(self, path: Path) -> Iterator[Path]:
        """Of a test: each conftest above it, and the data beside it."""
        if not self._is_test(path):
            return
        for folder in path.parents:
            if not folder.is_relative_to(self.root):
                break
            if (folder / "conftest.py").is_file():
                yield folder / "conftest.py"
        yield from (p for p in path.parent.iterdir() if p.is_file() and is_data(p))
        if path.is_relative_to(self.root / "plugins"):
            # Tests of a plugin are about all of it, also where only a variable names its modules and recipes.
            own = next(dist for dist in self.dists if path.is_relative_to(dist.folder))
            yield from (file for file in own.source.rglob("*.py") if is_source(file))
            yield from (file for file in own.data if file in self.recipes)

    def _is_test(self, path: Path) -> bool:
        if path not in self._tests:
            is_ours = path.is_relative_to(self.root)
            is_beside = is_ours and "tests" in path.relative_to(self.root).parts
            self._tests[path] = is_beside or (is_ours and path.name == "conftest.py")
        return self._tests[path]

    def _read(self, path: Path) -> Reads:
        if path not in self._reads:
            source = path.read_text(encoding="utf-8")
            self._reads[path] = read(source, name=self._name(path), package=self._package(path))
        return self._reads[path]

    def _name(self, path: Path) -> str:
        """Dotted name of the module in a file, as those beside it import it."""
        dist = self.dist_of(path)
        if dist is not None:
            return dotted(path.relative_to(dist.source))
        base = path.parent
        while (base / "__init__.py").is_file():
            base = base.parent
        return dotted(path.relative_to(base))

    def _package(self, path: Path) -> list[str]:
        parts = self._name(path).split(".")
        return parts if path.name == "__init__.py" else parts[:-1]

    def _imported(self, names: Iterable[str], path: Path) -> set[Path]:
        return {module for name in names for module in self._resolved(name, path)}

    def _resolved(self, name: str, path: Path) -> Iterator[Path]:
        """Files of a module and of the packages that hold it; of a name in a module, those of the module."""
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            module = self._module(".".join(parts[:length]), path)
            if module is not None:
                yield module

    def _module(self, name: str, path: Path) -> Path | None:
        if name in self.modules or not self._is_test(path):
            return self.modules.get(name)
        # A test finds what lies beside it or beside its package, and what all tests share.
        for folder in (self._folder(path), path.parent, self.root / "tests" / "support"):
            base = folder.joinpath(*name.split("."))
            for file in (base.with_suffix(".py"), base / "__init__.py"):
                if file.is_file():
                    return file
        return None

    def _folder(self, path: Path) -> Path:
        """The folder `tests` that a test is in, or what lies in the place of one."""
        return next((folder for folder in path.parents if folder.name == "tests"), path.parent)

    def _named(self, strings: Iterable[str], path: Path) -> Iterator[Node]:
        """What strings of a Python file lead to."""
        is_test, compared = self._is_test(path), self._read(path).compared
        has_defaults = path.is_relative_to(self.root / "packages")
        for text in strings:
            if MODULE.fullmatch(text) and (is_test or "." in text):
                yield from self._modules_named(text.partition(":")[0], path)
                yield from self._tree_named(text)
            if is_test:
                # A dotted name is that of a module or a setting.
                words = [] if "." in text and MODULE.fullmatch(text) else WORD.findall(ASSET.sub("", text))
                values = set(VALUE.findall(text))
                yield from self._with_parts(w for w in words if w not in self.everyday or w in values)
                yield from self._with_commands(COMMAND.findall(text))
                yield from self._with_assets(ASSET.findall(text))
                yield from self._files_named(text, path)
                for name in NAMED.findall(text):
                    yield from self._resolved(name, path)
                for dist in self.dists:
                    if text in dist.scripts:
                        yield from self._resolved(dist.scripts[text], path)
                    if text == dist.name:
                        yield from self._installed(dist)
            elif has_defaults and text not in self.everyday | compared and self._name(path) not in NAME_PACKAGES:
                # A dist imports its own parts; a string that equals the name of one means something else in it, as `ray` does
                # in the choice of a weight carrier.
                yield from self._with_parts([text], besides=self.dist_of(path))

    def _modules_named(self, text: str, path: Path) -> Iterator[Path]:
        if "*" not in text:
            yield from self._resolved(text, path)
            if self._is_test(path):
                yield from self._resolved(f"{text}.__main__", path)
            module = self._module(text, path)
            if module is not None and module.name == "__init__.py":
                yield from module.parent.glob("test_*.py")
        elif "." in text and not text.startswith("*") and not text.startswith("unirl.*"):
            # A pattern without a fixed beginning says nothing.
            pattern = re.compile(re.escape(text).replace(r"\*", r"\w*"))
            yield from (module for name, module in self._importable(path).items() if pattern.fullmatch(name))

    def _tree_named(self, text: str) -> Iterator[Path]:
        """The sources in a folder that a package ships: `package:folder`, as engines name additions to environments."""
        module, _, folder = text.partition(":")
        package = self.modules.get(module)
        if folder and package is not None and (package.parent / folder).is_dir():
            yield from (path for path in (package.parent / folder).rglob("*.py") if is_source(path))

    def _importable(self, path: Path) -> dict[str, Path]:
        """All modules that a file can import by name."""
        if not self._is_test(path):
            return self.modules
        folder = self._folder(path)
        if folder not in self._beside:
            files = (other for other in folder.rglob("*.py") if is_source(other))
            self._beside[folder] = {**{self._name(other): other for other in files}, **self.modules}
        return self._beside[folder]

    def _with_parts(self, words: Iterable[str], *, besides: Dist | None = None) -> Iterator[Node]:
        for word in words:
            for dist in self.parts.get(word, set()) - {besides}:
                yield from self.of_part(word, dist)
            yield from (path for path, name in self.recipes.items() if name == word)

    def of_part(self, name: str, dist: Dist) -> Iterator[Node]:
        """The part of this name of a plugin; all of the plugin where its sources do not tell its parts apart."""
        modules = [*self.of_plugin(dist)]
        found = [Part(module, name) for module in modules if name in self._read(module).parts]
        yield from found or modules

    def _of_recipe(self, path: Path, overridden: frozenset[str]) -> Iterator[Node]:
        recipe = self._recipe(path)
        yield from self._with_parts(part for group, part in recipe.chosen.items() if group not in overridden)
        yield from self._with_parts(recipe.words)
        yield from self._with_assets(recipe.assets)
        yield from (self.modules[name] for name in recipe.modules if name in self.modules)
        folder = self.recipes[path].rpartition("/")[0]
        for base in recipe.bases:
            names = (base, f"{folder}/{base}")
            yield from (Base(file, overridden | recipe.overridden) for file, n in self.recipes.items() if n in names)

    def _recipe(self, path: Path) -> Recipe:
        if path not in self._recipes:
            self._recipes[path] = read_recipe(path.read_text(encoding="utf-8"))
        return self._recipes[path]

    def _with_assets(self, names: Iterable[str]) -> Iterator[Path]:
        """A file that has all that its dist ships along with it."""
        for name in names:
            yield from (dist.folder / "pyproject.toml" for dist in self.registered(["asset"]).get(name, ()))

    def _with_commands(self, words: Iterable[str]) -> Iterator[Path]:
        for word in words:
            for dist in self.commands.get(word, ()):
                for module in self.of_plugin(dist):
                    yield from self._imported(self._read(module).commands, module)

    def _installed(self, dist: Dist) -> Iterator[Path]:
        """README and modules of a dist."""
        yield dist.folder / "README.md"
        yield from (path for path in dist.source.rglob("*.py") if is_source(path))

    def _along(self, path: Path) -> Iterator[Path]:
        """Of the dists that come along with those that a test installs."""
        if not self._is_test(path):
            return
        by_name = {dist.name: dist for dist in self.dists}
        waiting = [name for text in self._read(path).strings if text in by_name for name in by_name[text].needs]
        done = set[str]()
        while waiting:
            name = waiting.pop()
            if name in by_name and name not in done:
                done.add(name)
                waiting += by_name[name].needs
                yield by_name[name].folder / "README.md"
                yield from self._found(by_name[name])

    def _found(self, dist: Dist) -> set[Path]:
        """What finding the plugins of a dist reads: modules and, of each dist that has one of them, all that it ships
        besides."""
        if dist.name not in self._founds:
            self._founds[dist.name] = {
                *dist.data,
                *self.reached(self.of_plugin(dist), follows=lambda path: False),
            }
        return self._founds[dist.name]

    def _files_named(self, text: str, path: Path) -> Iterator[Path]:
        """Files, by their names or, where they are below the root, by their paths; and folders beside a test."""
        if not text or len(text) > 200 or not re.fullmatch(r"[\w./*-]+", text) or text.startswith(("/", ".")):
            return
        if "*" in text:
            if re.fullmatch(
                r"(conformance|docs|packages|plugins|tests)/([\w*-]+/)*[\w*-]+\.[a-z]+", text
            ) and not text.endswith(".py"):
                yield from (file for file in self.root.glob(text) if is_source(file))
                return
            pattern = re.compile(re.escape(text).replace(r"\*", r"[^/]*"))
            # Every module ends in `.py`, also one that a test writes elsewhere.
            if "." in text and text.strip("*./") and not (text.startswith("*") and text.endswith(".py")):
                yield from (file for file in path.parent.iterdir() if file.is_file() and pattern.fullmatch(file.name))
            return
        for file in (path.parent / text, self._folder(path) / text, self.root / text):
            if file.is_file():
                yield file
        folder = path.parent / text
        if folder.is_dir():
            yield from (file for file in folder.rglob("*") if file.is_file() and is_source(file))


def _file(node: Node) -> Path:
    """That it is, or in which it is described."""
    return node if isinstance(node, Path) else node.file
