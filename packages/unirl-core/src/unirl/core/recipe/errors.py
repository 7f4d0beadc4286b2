"""Hydra's and OmegaConf's exceptions as one sentence: what was given, what is expected, what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, cast

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationKeyError, OmegaConfBaseException

from ..errors import PluginNotInstalled, RecipeError, UniRLError
from ..names import did_you_mean, nearest
from ..plugins.registry import install_hint, known_parts
from ..specs.spec import Kind
from .files import PART_GROUPS, list_recipes
from .hydra_source import SAMPLING

if TYPE_CHECKING:
    from ..plugins.catalog import Catalog
    from ..specs.plan import Origin

__all__ = ["explain"]

_TAKEN = re.compile(r"""[A-Za-z0-9_/\\+.$%*@?|:,\[\]{}()'" -]""")
"""Characters that Hydra accepts in an unquoted value, or that are part of its grammar."""


def explain(error: BaseException, *, recipe: str, catalog: Catalog, origin: Origin | None = None) -> UniRLError:
    """The error to show a user for a failed composition. The caller keeps the original as its cause.

    origin: of the offending value, where it is known; otherwise Hydra's own account is used.
    """
    chain = list(_chain(error))
    where = _where(chain, recipe) if origin is None else _at(origin)
    for link in chain:
        if isinstance(link, UniRLError):
            key = next((str(e.full_key) for e in chain if isinstance(e, OmegaConfBaseException) and e.full_key), "")
            return RecipeError(f"{key}: {link}") if key else link
    for link in chain:
        if isinstance(link, RecursionError):
            return RecipeError(f"{recipe}: its defaults list includes itself; remove the cycle.")
        if isinstance(link, MissingConfigException):
            return _with_other_absent(_missing_config(link, catalog), recipe, catalog)
        if isinstance(link, OverrideParseException):
            return _not_an_override(str(link.override))
        if isinstance(link, (ConfigKeyError, ConfigAttributeError)) and not isinstance(link, InterpolationKeyError):
            return _unknown_key(link, where=where, catalog=catalog)
        if isinstance(link, OmegaConfBaseException):
            return RecipeError(f"{link.full_key or recipe}: {_first_line(link)}{where}.")
    return _other(error, recipe)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _not_an_override(override: str) -> RecipeError:
    """The error for an override that Hydra cannot parse, with the correct syntax."""
    key, equals, value = override.partition("=")
    own = "".join(dict.fromkeys(character for character in value if not _TAKEN.fullmatch(character)))
    if not equals or not own:
        return RecipeError(
            f"{override}: not an override. Overrides are key=value, +key=value, ++key=value and ~key; quote values "
            f"with commas, braces or spaces: '{key}=\"...\"'."
        )
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return RecipeError(
        f"{override}: the value contains {' '.join(own)}, which Hydra only accepts in quotes, within those of the "
        f"shell: '{key}=\"{escaped}\"'."
    )


_PART = re.compile(r"^\s*-\s*(?:override\s+)?/(\w+)(?:@[\w.]+)?:\s*([\w-]+)\s*(?:#.*)?$", re.MULTILINE)
"""An entry of a defaults list that chooses a part."""


def _with_other_absent(error: UniRLError, recipe: str, catalog: Catalog) -> UniRLError:
    """Hydra stops at the first part that is not installed; users want one install line for all that are missing."""
    if not isinstance(error, PluginNotInstalled):
        return error
    result = next((one for one in list_recipes() if one.name == recipe), None)
    parts = _PART.findall(result.file.read_text(encoding="utf-8")) if result else []
    known = [known_parts().part(kind, name) for kind, name in parts if name not in catalog.names(cast(Kind, kind))]
    dists = list(dict.fromkeys(part.dist for part in known if part is not None and not part.planned))
    if len(dists) < 2:
        return error
    return PluginNotInstalled(f"{error} To install all that {recipe} needs: `pip install {' '.join(dists)}`.")


def _missing_config(error: MissingConfigException, catalog: Catalog) -> UniRLError:
    path = (error.missing_cfg_file or "").removesuffix(".yaml")
    group, _, name = path.rpartition("/")
    if group == "sampling":
        hint = did_you_mean(name, SAMPLING) or "."
        return RecipeError(f"sampling: {name!r} is not a kind of sampling{hint} There are: {', '.join(SAMPLING)}.")
    if group in PART_GROUPS:
        try:
            catalog.get(cast(Kind, group), name)
        except UniRLError as result:
            return result
    relative = group.split("/")[-1]
    if relative in PART_GROUPS:
        return RecipeError(f"{path}: not found. In a recipe in a folder, parts need a slash: `- /{relative}: {name}`.")
    parent = re.match(r"In '(.+?)'", str(error))
    where = f"{parent[1]}.yaml" if parent else "defaults"
    hint = did_you_mean(path, [recipe.name for recipe in list_recipes()]) or "; see `unirl recipes`."
    return RecipeError(f"{where}: its defaults list names {path!r}, which was not found{hint}")


def _unknown_key(error: OmegaConfBaseException, *, where: str, catalog: Catalog) -> RecipeError:
    parent, full = error.parent_node, str(error.full_key)
    section, _, key = full.rpartition(".")
    node = parent if isinstance(parent, DictConfig) else OmegaConf.create({})
    kind = OmegaConf.get_type(node)
    known = [str(name) for name in node if name != "hydra"]
    if kind is not None and is_dataclass(kind):
        known = [item.name for item in fields(kind) if item.name != "use"]
        has = f"{kind.__name__ if section else 'a recipe'} has no such key"
    elif section in ("reward", "tracker"):
        return RecipeError(
            f"{full}: no {section} of this name is chosen{did_you_mean(key, known) or '.'} "
            f"There are: {', '.join(known) or 'none'}; add one with `+{section}@{section}.{key}=NAME`{where}."
        )
    elif section == "environment":
        return RecipeError(f"{full}: no environment is chosen; add one with +environment=NAME{where}.")
    else:
        return RecipeError(f"{full}: not set by the recipe; add a new key with a plus: `+{full}=...`{where}.")
    hint = did_you_mean(key, known)
    if not section:
        elsewhere = [f"{name}.{key}" for name in known if _holds(node, name, key)]
        hint = f"; did you mean {elsewhere[0]!r}?" if elsewhere else hint
    elif hint:
        hint = f"; did you mean {section}.{nearest(key, known)!s}?"
    others = _others_with(key, section.partition(".")[0], catalog)
    return RecipeError(f"{full}: {has}{hint or '.'} It has {', '.join(sorted(known))}{others}{where}.")


def _others_with(key: str, group: str, catalog: Catalog) -> str:
    """Installed parts of a group that have a setting of this name, or those that are not installed and may have it."""
    if group not in PART_GROUPS:
        return ""
    having: list[str] = []
    for spec in catalog.specs(cast(Kind, group)):
        try:
            config: Any = catalog.resolve(spec.config)
        except UniRLError:
            continue  # a broken part has no settings to choose it for
        if is_dataclass(config) and key in {item.name for item in fields(config)}:
            having.append(f"{group}={spec.name}")
    if having:
        return f"; {', '.join(having)} {'has' if len(having) == 1 else 'have'} it"
    known = [part for name in known_parts().names(group) if (part := known_parts().part(group, name)) is not None]
    absent = [part for part in known if part.name not in catalog.names(cast(Kind, group))]
    # Of a group with many parts, none is meant more than another.
    return f"; {group}={absent[0].name} may have it, {absent[0].hint}" if len(absent) == 1 else ""


def _holds(root: DictConfig, section: str, key: str) -> bool:
    node: Any = OmegaConf.select(root, section)
    return isinstance(node, DictConfig) and key in node


def _where(chain: list[BaseException], recipe: str) -> str:
    """The file or the override with the error, in parentheses."""
    for link in chain:
        override = re.match(
            r"(?:Error merging override |To append to your config use \+)(.+)", str(link).splitlines()[-1]
        )
        if override:
            return f" (command line: {override[1]})"
        file = re.match(r"In '(.+?)'", str(link))
        if file:
            return f" (in {file[1]}.yaml)"
    return f" (in {recipe}.yaml)"


def _at(origin: Origin) -> str:
    return f" (in {origin.detail})" if origin.source in ("default", "recipe") else f" ({origin})"


def _first_line(error: OmegaConfBaseException) -> str:
    text = str(error.msg or error)
    return text.splitlines()[0].rstrip(".")


def _other(error: BaseException, recipe: str) -> RecipeError:
    text = " ".join(str(error).split())
    unchosen = re.match(r"(?:In '(.+?)': )?Could not override '(\S+)'\.", text)
    if unchosen:
        key = unchosen[2]
        hint = re.search(r"Did you mean to override (?:one of )?(.+?)\?", text)
        at = f"{key}@{key}.{key}" if key in ("reward", "tracker") else key
        told = f"; did you mean {hint[1]}?" if hint else f"; the recipe chooses none. Add it: `+{at}=NAME`."
        if key == "launcher":
            told = (
                f"; no launcher is installed, so everything runs in this process. {install_hint('launcher', 'local')}"
            )
        return RecipeError(f"{key}: there is nothing to override{told}")
    return RecipeError(f"{recipe}: {text.rstrip('.')}.")
