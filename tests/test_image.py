"""The Dockerfile agrees with the locks and the checkout. The workflow builds it, without CUDA."""

from __future__ import annotations

import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from unirl.core.plugins.catalog import Catalog
from unirl.core.specs.spec import EngineSpec

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
LOCKS = sorted(ROOT.glob("plugins/engines/*/src/unirl/engines/*/locks/cuda*.txt"))


def cuda_of_lock() -> str:
    packages = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))["package"]
    return next(one["version"] for one in packages if one["name"] == "cuda-toolkit")


def test_its_compiler_is_of_the_cuda_release_of_training() -> None:
    tag = re.search(r"^ARG BASE=nvidia/cuda:(\d+\.\d+)\.\d+-devel-", TEXT, flags=re.MULTILINE)
    assert tag and cuda_of_lock().startswith(f"{tag[1]}.")


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: f"{path.parents[1].name}/{path.stem}")
def test_engines_have_that_release_too(lock: Path) -> None:
    found = re.search(r"^cuda-toolkit==(\d+\.\d+)", lock.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert found and cuda_of_lock().startswith(f"{found[1]}.")


def test_every_engine_with_an_environment_has_a_lock_that_is_looked_at() -> None:
    specs = [spec for spec in Catalog.discover().specs("engine") if isinstance(spec, EngineSpec) and spec.environment]
    assert {lock.parents[1].name for lock in LOCKS} == {spec.name.replace("-", "_") for spec in specs}


def test_nothing_that_is_committed_is_left_out_of_it() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    patterns = [line.removeprefix("**/") for line in lines if line and not line.startswith("#")]
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    out = [
        path
        for path in listed.stdout.splitlines()
        if any(fnmatch(part, p) for part in path.split("/") for p in patterns)
    ]
    assert out == []
