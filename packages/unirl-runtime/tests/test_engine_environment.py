"""Environments of engines: made from a lock, whole or not at all, and asked for by the command that makes them."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from unirl.core.errors import RecipeError, RunFailed
from unirl.runtime.engine_host.command import command
from unirl.runtime.engine_host.environment import COMPLETE, FOLDER_VARIABLE, EngineEnvironment, cache_folder
from unirl.runtime.engine_host.install import install

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., EngineEnvironment]:
    """An environment of one wheel that lies in a folder, with no index within reach."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    digest = hashlib.sha256(wheel(wheels).read_bytes()).hexdigest()
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "envs"))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    for tool in ("PIP", "UV"):
        monkeypatch.setenv(f"{tool}_NO_INDEX", "1")
        monkeypatch.setenv(f"{tool}_FIND_LINKS", str(wheels))

    def make(*, name: str = "doubling", hashed: str = digest) -> EngineEnvironment:
        # Of this test alone: Python remembers where it found a package of that name before.
        package = tmp_path / "packages" / f"locks_of_{name}_{digest_of(str(tmp_path))}"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "cpu.txt").write_text(f"acme-doubling==1.0 --hash=sha256:{hashed}\n", encoding="utf-8")
        monkeypatch.syspath_prepend(package.parent)
        return EngineEnvironment(
            name=name, package=package.name, locks={"cpu": "cpu.txt"}, python=PYTHON, serve="none:none"
        )

    return make


@pytest.mark.parametrize("tool", ["uv", "pip"])
def test_it_is_made_once_and_has_what_the_lock_says(
    environment: Callable[..., EngineEnvironment], tool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tool == "uv" and not shutil.which("uv"):
        pytest.skip("not run: there is no uv on the path")
    if tool == "pip":
        found = shutil.which
        monkeypatch.setattr(shutil, "which", lambda name: None if name == "uv" else found(name))
    asked = environment()
    with pytest.raises(RunFailed, match="unirl engine-env doubling --accel cpu"):
        asked.interpreter("cpu")
    made = install(asked, "cpu")
    again = install(asked, "cpu")
    assert (made.was_present, again.was_present, again.folder) == (False, True, made.folder)
    said = subprocess.run(
        [asked.interpreter("cpu"), "-I", "-c", "import acme_doubling; print(acme_doubling.NUMBER)\nimport unirl"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.stdout == "21\n"
    assert "No module named 'unirl'" in said.stderr
    # Scripts were made in another folder, which is gone.
    script = subprocess.run([made.folder / "bin" / "acme-double"], capture_output=True, text=True, check=True)
    assert script.stdout == "42\n"


def test_what_does_not_match_its_hash_leaves_nothing(environment: Callable[..., EngineEnvironment]) -> None:
    asked = environment(hashed="0" * 64)
    with pytest.raises(RunFailed, match="engine 'doubling': its environment cannot be made"):
        install(asked, "cpu")
    assert not asked.is_present("cpu")
    assert [path.suffix for path in cache_folder().iterdir()] == [".lock"]


def test_a_folder_that_was_left_half_made_is_never_used(environment: Callable[..., EngineEnvironment]) -> None:
    asked = environment()
    folder = asked.folder("cpu")
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    with pytest.raises(RunFailed, match="is not there"):
        asked.interpreter("cpu")
    install(asked, "cpu")
    assert (folder / COMPLETE).is_file()


def test_another_lock_is_another_folder(environment: Callable[..., EngineEnvironment], tmp_path: Path) -> None:
    one, other = environment(name="one"), environment(name="two", hashed="0" * 64)
    assert one.folder("cpu").name.startswith("one-cpu-")
    assert one.folder("cpu").name.rpartition("-")[2] != other.folder("cpu").name.rpartition("-")[2]
    assert one.folder("cpu", within=tmp_path).parent == tmp_path
    with pytest.raises(RecipeError, match="'cuda' was asked for; there are locks for cpu"):
        one.folder("cuda")


def test_the_command_says_which_engines_have_one() -> None:
    done = CliRunner().invoke(command, ["trainside"])
    assert isinstance(done.exception, RecipeError)
    assert "engine 'trainside' runs in the environment of UniRL" in str(done.exception)


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def wheel(folder: Path) -> Path:
    """A dist of one module and one script, as wheels are written down in the packaging specifications."""
    files = {
        "acme_doubling.py": "NUMBER = 21\n\ndef main():\n    print(2 * NUMBER)\n",
        "acme_doubling-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: acme-doubling\nVersion: 1.0\n",
        "acme_doubling-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "acme_doubling-1.0.dist-info/entry_points.txt": "[console_scripts]\nacme-double = acme_doubling:main\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()},{len(text)}\n"
        for name, text in files.items()
    )
    made = folder / "acme_doubling-1.0-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for name, text in {**files, "acme_doubling-1.0.dist-info/RECORD": record}.items():
            # A fixed date: the same bytes, and the same hash, each time.
            archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), text)
    return made
