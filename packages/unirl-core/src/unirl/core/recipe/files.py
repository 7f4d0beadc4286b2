"""Finding recipes: in packages of the entry-point group `unirl.recipes`, in `./recipes`, or at a given path."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import RecipeError
from ..names import did_you_mean
from ..plugins.entry_points import RECIPES_GROUP, entry_points
from ..plugins.registry import install_hint
from .assets import package_folder

__all__ = ["PART_GROUPS", "RecipeFile", "RecipeRoot", "find_recipe", "list_recipes", "recipe_roots"]

PART_GROUPS = (
    "model",
    "engine",
    "backend",
    "algorithm",
    "sampling",
    "reward",
    "environment",
    "tracker",
    "launcher",
    "transport",
)
"""Sections whose part is chosen by name. Files in folders of these names are options of them, not recipes."""


@dataclass(frozen=True, kw_only=True)
class RecipeRoot:
    """A folder of recipes: its file `sd3/flow-grpo.yaml` is the recipe `sd3/flow-grpo`."""

    folder: Path
    owner: str
    """Dist that ships it; empty for the user's own."""


@dataclass(frozen=True, kw_only=True)
class RecipeFile:
    name: str
    file: Path
    summary: str
    """The first sentence of its comment, after the command that runs it."""
    root: RecipeRoot
    hides: tuple[Path, ...] = ()
    """Other files of this name, further down the search order."""


def recipe_roots(directory: Path | None = None) -> list[RecipeRoot]:
    """Every folder of recipes in search order: `recipes` in `directory` (the current one), then packages by name."""
    own = (directory or _here()) / "recipes"
    roots = [RecipeRoot(folder=own, owner="")] if own.is_dir() else []
    for point in entry_points(RECIPES_GROUP):
        folder = package_folder(point.value)
        if folder is not None:
            roots.append(RecipeRoot(folder=folder, owner=point.dist))
    return roots


def _here() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError as error:
        raise RecipeError("the current folder no longer exists; `cd` to another one.") from error


def list_recipes(roots: list[RecipeRoot] | None = None) -> list[RecipeFile]:
    """Every recipe, by name."""
    return [_entry(name, result) for name, result in _by_name(roots).items()]


def _by_name(roots: list[RecipeRoot] | None) -> dict[str, list[tuple[Path, RecipeRoot]]]:
    files: dict[str, list[tuple[Path, RecipeRoot]]] = {}
    for root in recipe_roots() if roots is None else roots:
        for file in _yaml_files(root.folder):
            name = file.relative_to(root.folder).with_suffix("").as_posix()
            if name.split("/")[0] not in PART_GROUPS:
                files.setdefault(name, []).append((file, root))
    return dict(sorted(files.items()))


def find_recipe(name: str, roots: list[RecipeRoot] | None = None) -> RecipeFile:
    """The recipe of this name, or the file when `name` is a path that ends in .yaml.

    Raises RecipeError when there is none, or when two packages ship one of this name.
    """
    if name.endswith((".yaml", ".yml")):
        return _given(name)
    names = _by_name(roots)
    if name not in names:
        hint = did_you_mean(name, names) or f". {_install_hint(name)}".rstrip()
        raise RecipeError(f"recipe {name!r} was not found{hint} There are: {', '.join(names) or 'none installed'}.")
    result = _entry(name, names[name])
    if result.root.owner and result.hides:
        places = ", ".join(str(file) for file in (result.file, *result.hides))
        raise RecipeError(f"recipe {name!r}: two packages ship it ({places}). Give the path of the file instead.")
    return result


def _install_hint(name: str) -> str:
    """How to install a recipe named after a known model or asset package; empty when that is installed or unknown."""
    owner = name.split("/")[0]
    if package_folder(f"unirl.{owner}") or package_folder(f"unirl.models.{owner.replace('-', '_')}"):
        return ""
    return install_hint("asset", owner) or install_hint("model", owner)


def _given(path: str) -> RecipeFile:
    file = Path(path).absolute()
    if file.suffix == ".yml":
        raise RecipeError(f"{path}: recipe files end in .yaml; rename it.")
    if not file.is_file():
        raise RecipeError(f"{path}: no such recipe file.")
    return RecipeFile(name=file.stem, file=file, summary=_summary(file), root=RecipeRoot(folder=file.parent, owner=""))


def _entry(name: str, found: list[tuple[Path, RecipeRoot]]) -> RecipeFile:
    (file, root), *others = found
    # A checkout's `recipes/` links to its packages' files: a linked file is not a second recipe.
    hides = tuple(other for other, _ in others if other.resolve() != file.resolve())
    if others and not hides:
        root = next((r for _, r in found if r.owner), root)
    return RecipeFile(name=name, file=file, summary=_summary(file), root=root, hides=hides)


def _yaml_files(folder: Path, *, inside: tuple[Path, ...] = ()) -> list[Path]:
    """The recipe files below a folder. inside: its real parent folders, which are not visited again through links."""
    # Path.rglob does not follow links to folders, and a checkout's `recipes/` consists of them.
    real = folder.resolve()
    if real in inside:
        return []
    files: list[Path] = []
    for entry in sorted(folder.iterdir()):
        if entry.is_dir():
            files += _yaml_files(entry, inside=(*inside, real))
        elif entry.suffix == ".yaml" and entry.is_file():
            files.append(entry)
    return files


def _summary(file: Path) -> str:
    """The first sentence of its leading comment, after the command that runs it, which is by convention the first line.

    A file that is not valid text is refused when the recipe is used, not when recipes are listed.
    """
    words: list[str] = []
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                text = line.lstrip("#").strip()
                if words and not (line.startswith("#") and text):
                    break
                if line.startswith("#") and text and not text.startswith("unirl train "):
                    words.append(text)
                elif text and not line.startswith("#"):
                    break
    except OSError as error:
        return f"(cannot be read: {error.strerror})"
    return re.split(r"(?<=[a-z\d])\. ", " ".join(words).rstrip("."))[0]
