"""Environments of engines: made from a lock, whole or not at all, and asked for by the command that makes them."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest
from click.testing import CliRunner
from unirl.core.errors import RecipeError, RunFailed
from unirl.engine_host.command import command
from unirl.engine_host.environment import FOLDER_VARIABLE, EngineEnvironment, cache_folder
from unirl.engine_host.environment_files import COMPLETE
from unirl.engine_host.install import install, remove

pytestmark = pytest.mark.slow

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

    def make(*, name: str = "doubling", hashed: str = digest, added: str = "") -> EngineEnvironment:
        # Of this test alone: Python remembers where it found a package of that name before.
        package = tmp_path / "packages" / f"locks_of_{name}_{digest_of(str(tmp_path))}"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "cpu.txt").write_text(f"acme-doubling==1.0 --hash=sha256:{hashed}\n", encoding="utf-8")
        if added:
            tree(package / "more" / "acme-tripling", added)
        monkeypatch.syspath_prepend(package.parent)
        return EngineEnvironment(
            name=name,
            package=package.name,
            locks={"cpu": "cpu.txt"},
            python=PYTHON,
            serve="none:none",
            additions={"cpu": (f"{package.name}:more/acme-tripling",)} if added else {},
        )

    return make


@pytest.mark.parametrize("tool", ["uv", "pip"])
def test_it_is_made_once_and_has_what_the_lock_and_its_additions_say(
    environment: Callable[..., EngineEnvironment], tool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(tool, monkeypatch)
    asked = environment(added="WORD = 'three'\n")
    (source,) = asked.trees("cpu")
    before = sorted(source.rglob("*"))
    with pytest.raises(RunFailed, match="unirl engine-env doubling --accel cpu"):
        asked.interpreter("cpu")
    made = install(asked, "cpu")
    again = install(asked, "cpu")
    assert (made.was_present, again.was_present, again.folder) == (False, True, made.folder)
    # The tree lies in an installed package, where nothing may be written.
    assert sorted(source.rglob("*")) == before
    code = "import acme_doubling, acme_tripling; print(acme_doubling.NUMBER, acme_tripling.WORD)\nimport unirl"
    reply = subprocess.run([asked.interpreter("cpu"), "-I", "-c", code], capture_output=True, text=True, check=False)
    assert reply.stdout == "21 three\n"
    assert "No module named 'unirl'" in reply.stderr
    # Scripts were made in another folder, which is gone.
    script = subprocess.run([made.folder / "bin" / "acme-double"], capture_output=True, text=True, check=True)
    assert script.stdout == "42\n"


def test_what_is_added_counts_into_the_folder(environment: Callable[..., EngineEnvironment]) -> None:
    """And what Python leaves beside a source does not."""
    without, one, other = environment(name="a"), environment(name="b", added="1"), environment(name="c", added="2")
    keys = [made.folder("cpu").name.rpartition("-")[2] for made in (without, one, other)]
    assert len(set(keys)) == 3
    (source,) = one.trees("cpu")
    (source / "__pycache__").mkdir()
    (source / "__pycache__" / "acme_tripling.cpython.pyc").touch()
    assert one.folder("cpu").name.endswith(keys[1])
    assert one.trees("cuda") == []


def test_what_does_not_match_its_hash_leaves_nothing(environment: Callable[..., EngineEnvironment]) -> None:
    asked = environment(hashed="0" * 64)
    with pytest.raises(RunFailed, match="engine 'doubling': cannot create its environment"):
        install(asked, "cpu")
    assert not asked.is_present("cpu")
    assert [path.suffix for path in cache_folder().iterdir()] == [".lock"]


def test_a_folder_that_was_left_half_made_is_never_used(environment: Callable[..., EngineEnvironment]) -> None:
    asked = environment()
    folder = asked.folder("cpu")
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    with pytest.raises(RunFailed, match="does not exist"):
        asked.interpreter("cpu")
    install(asked, "cpu")
    assert (folder / COMPLETE).is_file()


def test_another_lock_is_another_folder(environment: Callable[..., EngineEnvironment], tmp_path: Path) -> None:
    one, other = environment(name="one"), environment(name="two", hashed="0" * 64)
    assert one.folder("cpu").name.startswith("one-cpu-")
    assert one.folder("cpu").name.rpartition("-")[2] != other.folder("cpu").name.rpartition("-")[2]
    assert one.folder("cpu", within=tmp_path).parent == tmp_path
    with pytest.raises(RecipeError, match="no environment for 'cuda'; there are lock files for cpu"):
        one.folder("cuda")


def test_another_release_is_an_environment_of_its_own(environment: Callable[..., EngineEnvironment]) -> None:
    newest = environment()
    folder = Path(str(files(newest.package)))
    (folder / "older.txt").write_text("acme-doubling==0.9\n", encoding="utf-8")
    both = dataclasses.replace(newest, earlier={"0.9.0": {"cpu": "older.txt"}})
    assert both.of("") is both and both.folder("cpu") == newest.folder("cpu")
    older = both.of("0.9.0")
    assert older.lock("cpu") == b"acme-doubling==0.9\n" and older.folder("cpu") != newest.folder("cpu")
    assert (newest.packages("cpu"), older.packages("cpu")) == ({"acme-doubling": "1.0"}, {"acme-doubling": "0.9"})
    assert older.command("cpu") == "unirl engine-env doubling --accel cpu --release 0.9.0"
    with pytest.raises(RecipeError, match=r"got release '0.8.0'; .* without a name, or for 0\.9\.0\."):
        both.of("0.8.0")


def test_the_command_says_which_engines_have_one() -> None:
    done = CliRunner().invoke(command, ["trainside"])
    assert isinstance(done.exception, RecipeError)
    assert "engine 'trainside' runs in UniRL's own environment" in str(done.exception)


def use(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = shutil.which
    if tool == "uv" and not result("uv"):
        pytest.skip("not run: there is no uv on the path")
    if tool == "pip":
        monkeypatch.setattr(shutil, "which", lambda name: None if name == "uv" else result(name))


def tree(folder: Path, content: str) -> None:
    """A source tree of one module that brings what builds it, for there is no index within reach."""
    folder.mkdir(parents=True)
    build = """
    [project]
    name = "acme-tripling"
    version = "1.0"
    [build-system]
    requires = []
    build-backend = "backend"
    backend-path = ["."]
    """
    backend = """
import zipfile

def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "acme_tripling-1.0"
    with zipfile.ZipFile(f"{folder}/{name}-py3-none-any.whl", "w") as archive:
        archive.write("acme_tripling.py")
        archive.writestr(f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\\nName: acme-tripling\\nVersion: 1.0\\n")
        archive.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        archive.writestr(f"{name}.dist-info/RECORD", "")
    return f"{name}-py3-none-any.whl"
"""
    for name, text in {
        "pyproject.toml": textwrap.dedent(build),
        "backend.py": backend,
        "acme_tripling.py": content,
    }.items():
        (folder / name).write_text(text, encoding="utf-8")


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


def test_a_file_in_place_of_the_folder_of_environments_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unirl.core.plugins.catalog import Catalog
    from unirl.tools.doctor import diagnose

    (tmp_path / "file").write_text("")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(RecipeError, match=r"UNIRL_ENVS: .* is a file"):
        cache_folder()
    diagnosis = diagnose(Catalog.discover())
    assert any(one.check == "engine" and "UNIRL_ENVS" in one.text for one in diagnosis.findings)


def test_half_a_removed_environment_is_not_taken_for_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its marker may be the last file that goes, and a process may be killed before."""
    folder = tmp_path / "environment"
    folder.mkdir()
    (folder / COMPLETE).touch()
    seen: list[Path] = []
    monkeypatch.setattr(shutil, "rmtree", seen.append)
    remove(folder)
    assert not folder.exists()
    (rest,) = seen
    assert (rest / COMPLETE).is_file()
