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
  a part, in packages, and each word of a string, in tests and recipes, leads to the plugin with that part, and to all
  that the plugin names. The same goes for recipes. Names that are everyday words, such as the
  reward `format`, count in tests only, as a whole string or as a value (`=format`, `reward: format`), and a dotted name,
  such as that of a module, names no part. Tests that discover what is installed and go through it (`.parts()`,
  `.specs()`, `.records`) lead to what finding all plugins imports.

With a module of a dist go the dist's `pyproject.toml` and every file that it ships which is not Python: locks of
engines, recipes, templates, checkpoints. With a test goes each `conftest.py` above it, what else lies in its folder and
is not Python and, of a plugin's test, all of the plugin.

Not followed is `Catalog.discover()`: it reads the light `plugin.py` of every dist that is installed, and one that is
broken does not hide the others (tests of the catalog show it), so parts that nobody names decide nothing.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from .dists import Dist, dotted, is_data, is_source, read_dist
from .python_files import Reads, read

__all__ = ["Dist", "Workspace"]

MODULE = re.compile(r"[A-Za-z_*][\w*]*(\.[A-Za-z_*][\w*]*)*(:[\w.*-]+)?")
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*(?:/[A-Za-z0-9_-]+)*")
VALUE = re.compile(r"(?:^|[=,+]|: |--\w+ )([A-Za-z0-9][A-Za-z0-9_-]*)")
"""A word where the name of a part stands: all of a string or its beginning, or a value."""
NAMED = re.compile(r"([A-Za-z_]\w*(?:\.\w+)+):\w")
"""A module in a recipe, such as that of a reward's function."""
NAME_PACKAGES = {"unirl.conformance.environment", "unirl.conformance.fixtures.plugin", "unirl.runtime.doctor"}
"""Modules whose strings name packages of an index, which may be called as parts are."""
WRITTEN = {"proven.json", "durations.json"}
"""What the gate writes itself."""
WHOLE_CATALOG = {"parts()", "specs()", "records"}
"""What gives all that is in a catalog: two methods, and an attribute."""


@dataclass
class Workspace:
    """A checkout, as it is on disk now."""

    root: Path
    _reads: dict[Path, Reads] = field(default_factory=dict, repr=False)
    _digests: dict[Path, str] = field(default_factory=dict, repr=False)
    _edges: dict[Path, tuple[set[Path], set[Path], set[Path]]] = field(default_factory=dict, repr=False)
    _beside: dict[Path, dict[str, Path]] = field(default_factory=dict, repr=False)
    _dist_of: dict[Path, Dist | None] = field(default_factory=dict, repr=False)
    _tests: dict[Path, bool] = field(default_factory=dict, repr=False)
    _founds: dict[str, set[Path]] = field(default_factory=dict, repr=False)

    @cached_property
    def dists(self) -> tuple[Dist, ...]:
        files = [*self.root.glob("packages/*/pyproject.toml"), *self.root.glob("plugins/*/*/pyproject.toml")]
        return tuple(read_dist(path) for path in sorted(files))

    @cached_property
    def modules(self) -> dict[str, Path]:
        """Of all dists: dotted name -> file; a package without `__init__.py` is not among them."""
        return {
            dotted(path.relative_to(dist.source)): path
            for dist in self.dists
            for path in dist.source.rglob("*.py")
            if is_source(path)
        }

    @cached_property
    def parts(self) -> dict[str, set[Dist]]:
        """Name of a part or of a recipe -> the dists that have one of this name. Parts are those of the
        registry, which a test compares with what is installed."""
        result: dict[str, set[Dist]] = {}
        by_name = {dist.name: dist for dist in self.dists}
        registry = tomllib.loads((self.root / "registry" / "plugins.toml").read_text(encoding="utf-8"))
        for kind, known in registry.items():
            for name, part in known.items():
                if part["dist"] in by_name and kind != "command":
                    result.setdefault(name, set()).add(by_name[part["dist"]])
        for path, name in self.recipes.items():
            dist = self.dist_of(path)
            assert dist is not None, f"{path} lies outside of all dists"
            result.setdefault(name, set()).add(dist)
        return result

    @cached_property
    def settings(self) -> set[Path]:
        """Modules of what can be set and of environments, as specs of plugins name them: `config=`, `environment=`."""
        plugins = [module for dist in self.dists for module in self.of_plugin(dist)]
        names = {text.partition(":")[0] for module in plugins for text in self._read(module).settings}
        return {self.modules[name] for name in names & self.modules.keys()}

    @cached_property
    def everyday(self) -> set[str]:
        """Names of parts that usually mean something else: all rewards, and models that are also packages in `uv.lock`. No
        default in `packages/` names such a part."""
        registry = tomllib.loads((self.root / "registry" / "plugins.toml").read_text(encoding="utf-8"))
        lock = tomllib.loads((self.root / "uv.lock").read_text(encoding="utf-8"))["package"]
        models = registry.get("model", {}).keys()
        return {*registry.get("reward", ()), *(models & {package["name"] for package in lock})}

    @cached_property
    def recipes(self) -> dict[Path, str]:
        """File of a recipe -> its name."""
        result: dict[Path, str] = {}
        for dist in self.dists:
            for path in dist.data:
                if path.suffix == ".yaml" and "recipes" in path.parts:
                    last = len(path.parts) - 1 - path.parts[::-1].index("recipes")
                    result[path] = "/".join(path.with_suffix("").parts[last + 1 :])
        return result

    def dist_of(self, path: Path) -> Dist | None:
        """The dist that ships a file."""
        if path not in self._dist_of:
            self._dist_of[path] = next((dist for dist in self.dists if path.is_relative_to(dist.source)), None)
        return self._dist_of[path]

    def reached(self, roots: Iterable[Path], *, follows: Callable[[Path], bool] = lambda path: True) -> set[Path]:
        """All files that decide what these do, themselves among them.

        follows: whether a file that only a string names, or a pattern, is meant.
        """
        result: set[Path] = set()
        waiting = [path for root in roots for path in (root, *self._around(root))]
        done: set[Path] = set()
        gate = f"{self.root / 'tests' / 'support' / 'proofs'}/"
        is_whole = False
        while waiting or not is_whole:
            if not waiting:
                is_whole = True
                if self._goes_through_a_catalog(result):
                    result.update(path for dist in self.dists for path in self._found(dist))
                continue
            path = waiting.pop()
            if path in done:
                continue
            done.add(path)
            # The gate decides which tests run, not how they end.
            if path.name in WRITTEN or str(path).startswith(gate):
                continue
            result.add(path)
            dist = self.dist_of(path)
            if dist is not None:
                result.update(dist.data)
            if path.suffix == ".py":
                imported, named, ends = self._edges_of(path)
                waiting += [*imported, *(target for target in named if follows(target))]
                result.update(ends)
            elif path in self.recipes:
                text = path.read_text(encoding="utf-8")
                waiting += self._with_parts(WORD.findall(text))
                waiting += (self.modules[name] for name in NAMED.findall(text) if name in self.modules)
        return result

    def forget(self, path: Path) -> None:
        """Read a file again, which was written to."""
        for known in (self._reads, self._digests, self._edges):
            known.pop(path, None)
        self._founds.clear()

    def _edges_of(self, path: Path) -> tuple[set[Path], set[Path], set[Path]]:
        """What a file imports, what it names, and files that lead no further."""
        if path not in self._edges:
            self._edges[path] = set(self._imported(path)), set(self._named(path)), set(self._along(path))
        return self._edges[path]

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
            # Tests of a plugin are about all of it, also where only a variable names its modules.
            own = next(dist for dist in self.dists if path.is_relative_to(dist.folder))
            yield from (file for file in own.source.rglob("*.py") if is_source(file))

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

    def _imported(self, path: Path) -> Iterator[Path]:
        for name in self._read(path).imports:
            yield from self._resolved(name, path)

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

    def _named(self, path: Path) -> Iterator[Path]:
        """What the strings of a Python file lead to."""
        reads, is_test = self._read(path), self._is_test(path)
        has_defaults = path.is_relative_to(self.root / "packages")
        for text in reads.strings:
            if MODULE.fullmatch(text) and (is_test or "." in text):
                yield from self._modules_named(text.partition(":")[0], path)
                yield from self._tree_named(text)
            if is_test:
                # A dotted name is that of a module or a setting.
                words = [] if "." in text and MODULE.fullmatch(text) else WORD.findall(text)
                values = set(VALUE.findall(text))
                yield from self._with_parts(w for w in words if w not in self.everyday or w in values)
                yield from self._files_named(text, path)
                for name in NAMED.findall(text):
                    yield from self._resolved(name, path)
                for dist in self.dists:
                    if text in dist.scripts:
                        yield from self._resolved(dist.scripts[text], path)
                    if text == dist.name:
                        yield from self._installed(dist)
            elif has_defaults and text not in self.everyday and self._name(path) not in NAME_PACKAGES:
                yield from self._with_parts([text])

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

    def _with_parts(self, words: Iterable[str]) -> Iterator[Path]:
        for word in words:
            for dist in self.parts.get(word, ()):
                yield from self.of_plugin(dist)
            yield from (path for path, name in self.recipes.items() if name == word)

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
