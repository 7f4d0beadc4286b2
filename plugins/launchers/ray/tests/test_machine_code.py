"""A worker loads the plugins of a plan that are single files, and refuses another content than the driver's."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from unirl.core.errors import PlanRejected
from unirl.core.plugins.files import file_version
from unirl.core.specs.plan import Plan
from unirl.launchers.ray.machine_code import check_versions, load_files
from unirl.transfer.wire import packed, unpacked


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "planted_for_workers.py"
    file.write_text("from dataclasses import dataclass\n@dataclass\nclass Config:\n    level: int = 1\n")
    monkeypatch.setitem(sys.modules, file.stem, cast(Any, None))
    del sys.modules[file.stem]
    return file


def plan(file: Path) -> Plan:
    choice = SimpleNamespace(dist=str(file), version=file_version(file))
    return cast(Plan, SimpleNamespace(choices=[choice]))


def test_objects_of_a_file_arrive_once_it_is_loaded(file: Path) -> None:
    load_files([file], machine="here")
    data = packed(sys.modules[file.stem].Config(level=3))
    del sys.modules[file.stem]
    with pytest.raises(ModuleNotFoundError):
        unpacked(data)
    load_files([file], machine="there")
    assert unpacked(data).level == 3


def test_a_machine_without_the_file_is_named(file: Path) -> None:
    with pytest.raises(PlanRejected, match=r"machine 'far' has no plugin file '.*gone.py'; copy it there"):
        load_files([file.with_name("planted_gone.py")], machine="far")


def test_another_content_is_refused(file: Path) -> None:
    made = plan(file)
    check_versions(made, "'here'")
    file.write_text("CHANGED = True\n")
    with pytest.raises(PlanRejected, match=r"planted_for_workers.py: got sha256:\w+, expected sha256:\w+"):
        check_versions(made, "'here'")
    file.unlink()
    with pytest.raises(PlanRejected, match="got nothing, expected"):
        check_versions(made, "'here'")
