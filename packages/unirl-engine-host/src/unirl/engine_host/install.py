"""Creates an engine's environment from its lock: built beside its final path with every hash checked, then renamed."""

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from unirl.core.errors import RunFailed

from .environment_files import COMPLETE, tree_files

if TYPE_CHECKING:
    from .environment import EngineEnvironment

__all__ = ["Installed", "default_accel", "install", "remove"]

TELL_S = 10.0
"""Interval between progress lines of an installer."""
TAIL = 12
"""Lines of a failed command's output shown in the error."""


@dataclass(frozen=True, kw_only=True)
class Installed:
    """An existing environment."""

    folder: Path
    seconds: float
    """Time to create it; 0 if it existed."""
    was_present: bool


def default_accel() -> str:
    """`cuda` if torch sees a GPU, else `cpu`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def install(
    environment: EngineEnvironment,
    accel: str,
    *,
    within: Path | None = None,
    recreate: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> Installed:
    """Create an engine's environment if it is missing. Safe for concurrent processes: it is created once.

    Uses `uv` if it is on the PATH, else venv and pip. pip's index and find-links settings apply to both.
    tell: called with a progress line every few seconds.
    Raises RunFailed, with the installer's last lines, when it cannot be created; leaves nothing behind.
    """
    folder = environment.folder(accel, within=within).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder.with_name(f"{folder.name}.lock")):
        if environment.is_present(accel, within=within):
            if not recreate:
                return Installed(folder=folder, seconds=0.0, was_present=True)
            remove(folder)
        began = time.perf_counter()
        # A folder without the marker file was left by another program.
        remove(folder)
        building = folder.with_name(f"{folder.name}.building-{os.getpid()}-{secrets.token_hex(3)}")
        try:
            tell(f"making {folder}")
            watched = _Watched(environment=environment, building=building, tell=tell)
            _make(environment, accel, building, watched)
            _add(environment, accel, watched)
            _move_scripts(building, folder)
            facts = {"engine": environment.name, "accel": accel, "python": environment.python}
            (building / COMPLETE).write_text(json.dumps(facts), encoding="utf-8")
            building.rename(folder)
        finally:
            remove(building)
        return Installed(folder=folder, seconds=time.perf_counter() - began, was_present=False)


def _make(environment: EngineEnvironment, accel: str, building: Path, watched: _Watched) -> None:
    lock = building.with_name(f"{building.name}.txt")
    lock.write_bytes(environment.lock(accel))
    python = str(building / "bin" / "python")
    hashed = ["--no-deps", "--require-hashes", "--requirement", str(lock)]
    uv = _uv()
    venv, packages = f"a Python {environment.python}", f"{len(environment.packages(accel))} packages"
    try:
        if uv:
            watched.run([uv, "venv", "--quiet", "--python", environment.python, str(building)], what=venv)
            watched.run([uv, "pip", "install", "--quiet", "--python", python, *_pip_sources(), *hashed], what=packages)
        else:
            watched.run([_base_python(environment), "-m", "venv", str(building)], what=venv)
            watched.run(
                [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *hashed], what=packages
            )
    finally:
        lock.unlink(missing_ok=True)


def _add(environment: EngineEnvironment, accel: str, watched: _Watched) -> None:
    """Build and install the additions from copies, because a build may write into its source tree."""
    python = str(watched.building / "bin" / "python")
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
            watched.run(words, what=tree.name)


def _uv() -> str | None:
    """Absolute path of uv, which runs in another folder than this process."""
    result = shutil.which("uv")
    return str(Path(result).absolute()) if result else None


@dataclass(frozen=True, kw_only=True)
class _Watched:
    """Runs the installation commands and reports progress."""

    environment: EngineEnvironment
    building: Path
    tell: Callable[[str], None]

    def run(self, command: Sequence[str], *, what: str) -> None:
        """what: item being installed, for progress lines."""
        # The installer must not use the caller's environment.
        kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
        began = time.perf_counter()
        self.tell(f"installing {what}")
        with tempfile.TemporaryFile("w+") as output:
            # Outside any project: uv applies the constraints of the project it is started in.
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=kept, cwd=tempfile.gettempdir()
            )
            try:
                while not _ends(process, within_s=TELL_S):
                    megabytes = _size_bytes(self.building) / 2**20
                    seconds = time.perf_counter() - began
                    self.tell(f"installing {what}: {seconds:.0f} s, {megabytes:.0f} MiB so far")
            except BaseException:
                process.kill()
                process.wait()
                raise
            if process.returncode:
                output.seek(0)
                tail = "\n".join(output.read().strip().splitlines()[-TAIL:])
                raise RunFailed(
                    f"engine {self.environment.name!r}: cannot create its environment: {' '.join(command[:4])} ... "
                    f"failed with exit code {process.returncode}:\n{tail}\nCheck that the package index is reachable "
                    "and that the lock is for this platform."
                )


def _ends(process: subprocess.Popen[bytes], *, within_s: float) -> bool:
    try:
        process.wait(timeout=within_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _size_bytes(folder: Path) -> int:
    """Total size of the files in a folder that is being written to."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += (Path(parent) / name).lstat().st_size
    return total


def _pip_sources() -> list[str]:
    """pip's index and find-links as options of uv, which does not read pip's settings."""
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    if not asked and (pip := shutil.which("pip")):
        # An environment created by uv has no pip.
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
    result = sys.executable if own == environment.python else shutil.which(f"python{environment.python}")
    if result is None:
        raise RunFailed(
            f"engine {environment.name!r}: its lock is for Python {environment.python}, which is not on the PATH. "
            "Install it, or install uv, which downloads it."
        )
    return result


def _move_scripts(building: Path, folder: Path) -> None:
    """Rewrite the build folder's path in scripts and activation files."""
    for script in (building / "bin").iterdir():
        if script.is_symlink() or not script.is_file():
            continue
        content = script.read_bytes()
        if os.fsencode(building) in content and b"\0" not in content:
            script.write_bytes(content.replace(os.fsencode(building), os.fsencode(folder)))


def remove(folder: Path) -> None:
    """Under another name first: half of an environment that still has its marker would be taken for a whole one."""
    if folder.exists():
        rest = folder.with_name(f"{folder.name}.removed-{os.getpid()}-{secrets.token_hex(3)}")
        shutil.rmtree(folder.rename(rest))


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Inter-process lock."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
