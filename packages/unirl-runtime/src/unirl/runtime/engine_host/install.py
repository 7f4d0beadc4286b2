"""Making the environment of an engine from its lock: beside its place, every hash checked, then renamed into it."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from unirl.core.errors import RunFailed

from .environment import COMPLETE, EngineEnvironment, tree_files

__all__ = ["Installed", "default_accel", "install"]

TAIL = 12
"""Lines of a failed command's output that its error shows."""


@dataclass(frozen=True, kw_only=True)
class Installed:
    """An environment that is there."""

    folder: Path
    seconds: float
    """That making it took; 0 when it was there already."""
    was_present: bool


def default_accel() -> str:
    """`cuda` where torch sees a GPU, else `cpu`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def install(
    environment: EngineEnvironment, accel: str, *, within: Path | None = None, recreate: bool = False
) -> Installed:
    """Make the environment of an engine, or find it. Two processes that ask at once make it once.

    With `uv` where there is one on the path, else with venv and pip. pip's settings for indexes and find-links hold for
    both. Raises RunFailed, with the last lines of the installer, when it cannot be made; nothing is left then.
    """
    folder = environment.folder(accel, within=within).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder.with_name(f"{folder.name}.lock")):
        if environment.is_present(accel, within=within):
            if not recreate:
                return Installed(folder=folder, seconds=0.0, was_present=True)
            _remove(folder)
        began = time.perf_counter()
        # A folder without its last file is what some other program left.
        _remove(folder)
        building = folder.with_name(f"{folder.name}.building-{os.getpid()}-{secrets.token_hex(3)}")
        try:
            _make(environment, accel, building)
            _add(environment, accel, building)
            _move_scripts(building, folder)
            facts = {"engine": environment.name, "accel": accel, "python": environment.python}
            (building / COMPLETE).write_text(json.dumps(facts), encoding="utf-8")
            building.rename(folder)
        finally:
            _remove(building)
        return Installed(folder=folder, seconds=time.perf_counter() - began, was_present=False)


def _make(environment: EngineEnvironment, accel: str, building: Path) -> None:
    lock = building.with_name(f"{building.name}.txt")
    lock.write_bytes(environment.lock(accel))
    python = str(building / "bin" / "python")
    hashed = ["--no-deps", "--require-hashes", "--requirement", str(lock)]
    uv = _uv()
    try:
        if uv:
            _run([uv, "venv", "--quiet", "--python", environment.python, str(building)], environment)
            _run([uv, "pip", "install", "--quiet", "--python", python, *_pip_sources(), *hashed], environment)
        else:
            _run([_base_python(environment), "-m", "venv", str(building)], environment)
            _run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *hashed], environment)
    finally:
        lock.unlink(missing_ok=True)


def _add(environment: EngineEnvironment, accel: str, building: Path) -> None:
    """Build and install its additions, which lie in installed packages: from copies, for a build may write beside."""
    python = str(building / "bin" / "python")
    uv = _uv()
    for tree in environment.trees(accel):
        with tempfile.TemporaryDirectory(prefix="unirl-addition-") as name:
            copy = Path(name) / tree.name
            for file in tree_files(tree):
                target = copy / file.relative_to(tree)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)
            if uv:
                words = [uv, "pip", "install", "--quiet", "--python", python, *_pip_sources(), "--no-deps", str(copy)]
            else:
                pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
                words = [*pip, "--no-deps", str(copy)]
            _run(words, environment)


def _uv() -> str | None:
    """Path of uv, which runs in another folder than this process."""
    found = shutil.which("uv")
    return str(Path(found).absolute()) if found else None


def _run(command: Sequence[str], environment: EngineEnvironment) -> None:
    # The caller's own environment must not be taken for the one that is made.
    kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    # In a folder of no project: uv holds installs to the constraints of the one that it is started in.
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=kept,
        cwd=tempfile.gettempdir(),
        check=False,
    )
    if done.returncode:
        tail = "\n".join(done.stdout.strip().splitlines()[-TAIL:])
        raise RunFailed(
            f"engine {environment.name!r}: its environment cannot be made: {' '.join(command[:4])} ... ended with exit "
            f"code {done.returncode}:\n{tail}\nIs the package index within reach, and does the machine fit the lock?"
        )


def _pip_sources() -> list[str]:
    """pip's index and find-links as options of uv, which does not read pip's settings."""
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    if not asked and (pip := shutil.which("pip")):
        # An environment that uv made has no pip of its own.
        asked = subprocess.run([pip, "config", "list"], capture_output=True, text=True, check=False).stdout
    options: dict[str, dict[str, None]] = {"find-links": {}, "index-url": {}}
    for line in asked.splitlines():
        name, _, value = line.partition("=")
        option = name.rpartition(".")[2]
        if option in options:
            options[option] |= dict.fromkeys(value.strip("'\"").split())
    indexes = [] if "UV_INDEX_URL" in os.environ or "UV_DEFAULT_INDEX" in os.environ else options["index-url"]
    links = [word for link in options["find-links"] for word in ("--find-links", link)]
    return [*links, *(word for index in list(indexes)[:1] for word in ("--default-index", index))]


def _base_python(environment: EngineEnvironment) -> str:
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = sys.executable if own == environment.python else shutil.which(f"python{environment.python}")
    if found is None:
        raise RunFailed(
            f"engine {environment.name!r}: its lock is for Python {environment.python}, which is not on the path. "
            "Install it, or install uv, which fetches it."
        )
    return found


def _move_scripts(building: Path, folder: Path) -> None:
    """Scripts and activation files name the folder that they were made in."""
    for script in (building / "bin").iterdir():
        if script.is_symlink() or not script.is_file():
            continue
        content = script.read_bytes()
        if os.fsencode(building) in content and b"\0" not in content:
            script.write_bytes(content.replace(os.fsencode(building), os.fsencode(folder)))


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process at a time inside."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
