"""Fixtures for tests of built wheels: uv, commands outside this environment, the wheels of the workspace."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def uv() -> str:
    own = ROOT / ".uv-bin" / "bin" / "uv"
    result = shutil.which("uv") or (str(own) if own.is_file() else None)
    assert result, "uv is missing; `python3 bootstrap.py --dev` brings it"
    return result


@pytest.fixture(scope="session")
def run() -> Run:
    """`run(*words, cwd, code=0, **environment)`: run a command without this environment's variables; check its code."""

    def run(
        *words: object, cwd: Path | None = None, code: int = 0, timeout_s: float = 280, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        kept = {
            key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH", "UV_PYTHON")
        }
        done = subprocess.run(
            [str(word) for word in words],
            cwd=cwd or ROOT,
            env={**kept, **environment},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == code, f"{' '.join(map(str, words))}\n{done.stdout}\n{done.stderr}"
        return done

    return run


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory, run: Run, uv: str) -> dict[str, Path]:
    """Name of each dist of the workspace -> its wheel."""
    folder = tmp_path_factory.mktemp("wheels")
    run(uv, "build", "--all-packages", "--wheel", "--quiet", "--out-dir", folder)
    return {path.name.split("-")[0].replace("_", "-"): path for path in folder.glob("*.whl")}
