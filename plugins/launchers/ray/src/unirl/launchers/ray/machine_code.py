"""The code of a machine: it must be what the plan was made with."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from unirl.core.errors import PlanRejected
from unirl.core.plugins.files import file_version, import_plugin_file
from unirl.core.specs.plan import Plan

__all__ = ["check_versions", "load_files"]


def load_files(files: Sequence[Path], *, machine: str) -> None:
    """Import the single-file plugins of a plan. Raises PlanRejected for a missing file."""
    for file in files:
        try:
            import_plugin_file(file)
        except FileNotFoundError as error:
            raise PlanRejected(
                f"launcher: machine {machine!r} has no plugin file {str(file)!r}; copy it there, or to a folder that "
                "all machines share."
            ) from error


def check_versions(plan: Plan, machine: str) -> None:
    """Raises PlanRejected where this machine has other versions of packages than the plan was made with."""
    wrong: list[str] = []
    for dist_name, expected in {choice.dist: choice.version for choice in plan.choices}.items():
        try:
            result = file_version(Path(dist_name)) if dist_name.endswith(".py") else version(dist_name)
        except (PackageNotFoundError, FileNotFoundError):
            result = "nothing"
        if result != expected:
            wrong.append(f"{dist_name}: got {result}, expected {expected}")
    if wrong:
        raise PlanRejected(f"launcher: machine {machine} has other packages than the driver: {'; '.join(wrong)}.")
