"""Modules from single Python files, and plugins that are such files: `unirl train --plugins-dir DIR`."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from ..errors import RecipeError
from .loading import Plugin, PluginRecord, broken, disabled_plugin, imported, register

__all__ = ["file_version", "import_plugin_file", "load_plugin_file", "module_of_file", "plugin_files"]


def plugin_files(folder: Path) -> list[Path]:
    """Every `.py` file in a folder, as absolute paths, sorted. Raises RecipeError when there is no such folder."""
    if not folder.is_dir():
        raise RecipeError(f"--plugins-dir: got {str(folder)!r}, expected a folder of plugin files.")
    return sorted(file.absolute() for file in folder.glob("*.py"))


def load_plugin_file(file: Path, *, disabled: bool) -> Plugin:
    """Import a file and collect its specs; a failure becomes its record, as for an installed plugin.

    file: absolute. The plugin and its module are named after the file; its dist is the path.
    """
    version = "unreadable"
    blank = PluginRecord(name=file.stem, dist=str(file), version=version, module=file.stem, status="loaded")
    if disabled:
        return disabled_plugin(blank)
    try:
        blank = PluginRecord(
            name=file.stem, dist=str(file), version=file_version(file), module=file.stem, status="loaded"
        )
    except OSError as error:
        return broken(blank, f"it cannot be read: {error.strerror}.", cause=error)
    result = imported(lambda: import_plugin_file(file), blank, what=str(file))
    return result if isinstance(result, Plugin) else register(result, blank)


def import_plugin_file(file: Path) -> ModuleType:
    """The module of a plugin file, named after the file, so that specs can refer to its contents.

    Imported once per process. Raises ImportError for a name that is not an identifier, or that another module has.
    """
    name = file.stem
    if not name.isidentifier():
        raise ImportError(f"the file name {name!r} is not a Python identifier; rename it, with underscores for dashes")
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(file):
        return loaded
    other = importlib.util.find_spec(name) if loaded is None else loaded.__spec__
    if loaded is not None or (other is not None and other.origin != str(file)):
        where = other.origin if other is not None else "this process"
        raise ImportError(f"a module {name!r} already exists ({where}); rename the file")
    return module_of_file(file, name=name)


def module_of_file(file: Path, *, name: str) -> ModuleType:
    """The module `name` made by running a Python file, in `sys.modules` as long as it did not raise.

    file: absolute. Run once per process: a loaded module of this name is returned as it is. Raises OSError when the
    file cannot be read, and whatever it raises itself.
    """
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        # Not by the loader: its cached byte code is that of any file of the same size within the same second.
        exec(compile(file.read_bytes(), str(file), "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def file_version(file: Path) -> str:
    """Version of a plugin file: the first digits of the SHA-256 of its content."""
    return f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"
