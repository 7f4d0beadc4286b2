"""Files of a plugin from its names: every text of them is a template in `templates/`."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from packaging.version import Version
from unirl.core.errors import RecipeError
from unirl.new.kinds import KINDS, Shape
from unirl.new.names import Names

__all__ = ["check_folder", "render", "write"]

_COMMON = {
    "common/pyproject.toml": "pyproject.toml",
    "common/gitignore": ".gitignore",
    "common/conformance.yml": ".github/workflows/conformance.yml",
    "common/test_conformance.py": "tests/test_conformance.py",
}


def render(
    names: Names,
    *,
    author: str = "",
    templates: str = "",
    shape: Shape | None = None,
    facts: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Path -> text of every file.  author: `Name`, or `Name <address>`.  Raises RecipeError for another form.

    templates, shape: folder of the templates, and what they make, in place of those of the kind.  facts: further values
    that these templates read.
    """
    shape = KINDS[names.kind] if shape is None else shape
    templates = templates or names.kind
    environment = Environment(
        loader=PackageLoader("unirl.new"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        # These are Python and TOML files; nothing is to be escaped for HTML.
        autoescape=False,
    )
    environment.filters["python"] = _python
    bounded = [_bounded(requirement) for requirement in shape.requires]
    dev = ["pytest>=8.4", "ruff>=0.12", *(_bounded(dist) for dist in ("unirl-conformance", *shape.proves_with))]
    values: dict[str, Any] = {
        **(facts or {}),
        "kind": names.kind,
        "article": "an" if names.kind[0] in "ae" else "a",
        "name": names.name,
        "dist": names.dist,
        "package": names.package,
        "cls": names.class_name,
        "description": shape.description.format(name=names.name),
        "author": _author(author),
        "dependencies": bounded,
        "dev": sorted(dev),
    }
    places = dict(_COMMON)
    places[f"{templates}/README.md"] = "README.md"
    places[f"{templates}/test_{names.kind}.py"] = f"tests/test_{names.kind}.py"
    for module in ("plugin", "config", *shape.modules):
        places[f"{templates}/{module}.py"] = f"src/{names.package}/{module}.py"
    files = {place: environment.get_template(f"{template}.jinja").render(values) for template, place in places.items()}
    files["LICENSE"] = environment.get_template("common/LICENSE").render()
    files[f"src/{names.package}/__init__.py"] = ""
    files[f"src/{names.package}/py.typed"] = ""
    return dict(sorted(files.items()))


def check_folder(folder: Path) -> None:
    """Raises RecipeError for one that exists."""
    if folder.exists() or folder.is_symlink():
        raise RecipeError(f"--into: {str(folder)!r} is there already, and nothing in it is overwritten; move it away.")


def write(files: Mapping[str, str | bytes], folder: Path) -> None:
    """Write the files into a folder that does not exist yet, all or none. Raises RecipeError where it does."""
    check_folder(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".unirl-new-") as scratch:
            whole = Path(scratch) / folder.name
            for name, text in files.items():
                path = whole / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(text if isinstance(text, bytes) else text.encode())
            whole.rename(folder)
    except OSError as error:
        raise RecipeError(f"--into: {str(folder)!r} cannot be written: {error}.") from error


def _python(value: str | Sequence[str], indent: int = 4) -> str:
    """A string, or a tuple of strings, as formatted code in a line that is indented by this many spaces."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if len(value) < 2:
        return f"({json.dumps(value[0])},)" if value else "()"
    space = " " * indent
    return "(\n" + "".join(f"{space}    {json.dumps(each)},\n" for each in value) + f"{space})"


def _bounded(requirement: str) -> str:
    """A requirement; of a dist of UniRL, from the release at hand up to the next that may change what plugins use."""
    if not requirement.startswith("unirl-"):
        return requirement
    release = Version(version("unirl-core")).release
    upper = f"0.{release[1] + 1}" if release[0] == 0 else f"{release[0] + 1}"
    return f"{requirement}>={release[0]}.{release[1]},<{upper}"


def _author(text: str) -> str:
    """The TOML of `authors`' one entry, or an empty string."""
    if not text.strip():
        return ""
    result = re.fullmatch(r"\s*([^<>]*?)\s*(?:<([^<>@\s]+@[^<>@\s]+)>)?\s*", text)
    if result is None or not any(result.groups()):
        raise RecipeError(f"--author: got {text!r}, expected `Name` or `Name <name@example.org>`.")
    # A JSON string is a TOML string too.
    pairs = zip(("name", "email"), result.groups(), strict=True)
    return "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in pairs if value) + " }"
