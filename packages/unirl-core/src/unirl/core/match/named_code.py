"""Code that the settings of a plan name, and where it comes from. Nothing of it is imported."""

from __future__ import annotations

import importlib.util
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..limits import Reason
from ..plugins.entry_points import ASSETS_GROUP, RECIPES_GROUP, entry_points
from ..recipe.assets import package_folder

if TYPE_CHECKING:
    from ..plugins.catalog import Catalog
    from ..specs.plan import Plan

__all__ = ["FLAG", "NamedCode", "named_code", "not_allowed"]

FLAG = "--allow-code"
_IN_MODULE = re.compile(r"[\w.]+:[\w.]+")


@dataclass(frozen=True, kw_only=True)
class NamedCode:
    key: str
    """Key of the setting."""
    code: str
    """`package.module:name`, a file, or a description."""
    is_foreign: bool
    """True for code from outside the installed plugins and the current folder, and for code of unknown origin."""


def named_code(plan: Plan, *, catalog: Catalog) -> list[NamedCode]:
    """Everything that settings of the plan name to be run, in the order of its parts.

    That is what `PartConfig.named_code` gives, and kernels and guidances that are `module:Class`.
    """
    packages = _packages(catalog)
    files = {Path(record.dist) for record in catalog.records if record.is_file}
    folders = [folder for package in packages if (folder := package_folder(package)) is not None]

    def is_foreign(code: str | Path) -> bool:
        if isinstance(code, Path):
            return not (code in files or _is_own(code) or any(code.resolve().is_relative_to(f) for f in folders))
        module = code.partition(":")[0]
        if not _IN_MODULE.fullmatch(code):
            return True
        return not any(f"{module}.".startswith(f"{package}.") for package in packages) and not _is_own_module(module)

    named = dict(_named(plan))
    return [NamedCode(key=key, code=str(code), is_foreign=is_foreign(code)) for key, code in named.items()]


def not_allowed(plan: Plan, *, catalog: Catalog) -> list[Reason]:
    """A reason for each setting that names foreign code; none where the catalog's command allows it."""
    if catalog.allows_code:
        return []
    return [
        Reason(
            key=one.key,
            text=f"got {one.code}: code from outside the installed plugins and the current folder. Read "
            f"it, then allow it with {FLAG}.",
        )
        for one in named_code(plan, catalog=catalog)
        if one.is_foreign
    ]


def _named(plan: Plan) -> Iterator[tuple[str, str | Path]]:
    for choice in plan.choices:
        with choice.attributed():
            named = dict(choice.config.named_code())
        yield from ((f"{choice.key}{key}", code) for key, code in named.items())
    for stage in plan.stages:
        name = f".{stage.name}" if len(plan.stages) > 1 else ""
        for key, values in (("sampling", vars(stage.sampling)), ("eval.sampling", stage.eval_sampling)):
            for field in ("kernel", "guidance_mode"):
                if ":" in str(values.get(field, "")):
                    yield f"{key}{name}.{field}", str(values[field])


def _packages(catalog: Catalog) -> list[str]:
    """Packages of plugins, recipes and assets that are installed, and modules of single files."""
    modules = [record.module.partition(":")[0] for record in catalog.records if record.status == "loaded"]
    packages = [module if "." not in module else module.rpartition(".")[0] for module in modules]
    points = [point.value for group in (RECIPES_GROUP, ASSETS_GROUP) for point in entry_points(group)]
    return sorted({*packages, *points})


def _is_own_module(module: str) -> bool:
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    places = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.has_location and spec.origin else [])]
    return bool(places) and all(_is_own(Path(place)) for place in places)


def _is_own(path: Path) -> bool:
    """Whether a file is in the current folder, links followed, and is not of an environment in there."""
    installed = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    real = path.resolve()
    return real.is_relative_to(Path.cwd().resolve()) and not any(real.is_relative_to(each) for each in installed)
