"""Modules of UniRL that are copied to an engine's environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from unirl.engine_host.source_files import source_files

PARENT = """
from __future__ import annotations
from typing import TYPE_CHECKING

import json
import unirl.planted.plain
from unirl.planted import named
from .relative import VALUE
from . import beside

if TYPE_CHECKING:
    from unirl.planted.types_only import T
else:
    import unirl.planted.otherwise

def called():
    try:
        from unirl.planted.within import VALUE
    except ImportError:
        import unirl.planted.fallback
"""
IMPORTED = ("plain", "named", "relative", "beside", "otherwise", "within", "fallback")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `unirl.planted`, on the path."""
    folder = tmp_path / "unirl" / "planted"
    folder.mkdir(parents=True)
    (folder / "parent.py").write_text(PARENT)
    for name in (*IMPORTED, "types_only", "stranger"):
        (folder / f"{name}.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def test_a_module_comes_with_all_that_it_imports_but_for_types(package: Path) -> None:
    expected = {f"unirl.planted.{name}": package / f"{name}.py" for name in ("parent", *IMPORTED)}
    assert source_files(["unirl.planted.parent"]) == expected


def test_imports_of_imports_come_too_and_circles_end(package: Path) -> None:
    (package / "named.py").write_text("from unirl.planted import stranger\n")
    (package / "stranger.py").write_text("from unirl.planted.parent import called\n")
    assert "unirl.planted.stranger" in source_files(["unirl.planted.parent"])
    assert source_files(["unirl.planted.stranger"]) == source_files(["unirl.planted.parent"])


def test_a_module_that_is_not_there_is_an_error(package: Path) -> None:
    (package / "named.py").write_text("from unirl.planted import absent\n")
    with pytest.raises(AssertionError, match=r"no source of unirl\.planted\.absent"):
        source_files(["unirl.planted.parent"])
