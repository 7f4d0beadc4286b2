"""A release, rehearsed: every dist is uploaded to an index on this machine, and users and authors work with that."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from unirl.conformance.report.file import load

# Every dist is built and uploaded.

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[1]
Run = Callable[..., subprocess.CompletedProcess[str]]
TWINE = (sys.executable, "-m", "twine")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, run: Run, uv: str) -> list[Path]:
    """The wheel and the source of each dist of the workspace."""
    folder = tmp_path_factory.mktemp("dist")
    run(uv, "build", "--all-packages", "--quiet", "--out-dir", folder)
    return sorted(path for path in folder.iterdir() if path.suffix in (".whl", ".gz"))


class Index:
    """An index that takes uploads, as the public one does."""

    def __init__(self, url: str, run: Run) -> None:
        self.url, self._run = url, run

    def upload(self, *files: Path) -> None:
        self._run(*TWINE, "upload", "--repository-url", f"{self.url}/", "--disable-progress-bar", *files, **ANYONE)

    def names(self) -> set[str]:
        with urllib.request.urlopen(f"{self.url}/simple/", timeout=30) as page:
            return {line.split('"')[1].strip("/") for line in page.read().decode().splitlines() if "<a href" in line}


ANYONE = {"TWINE_USERNAME": "any", "TWINE_PASSWORD": "any"}


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, run: Run) -> Iterator[Index]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("index")
    words = ("run", "--interface", "127.0.0.1", "--port", port, "--passwords", ".", "--authenticate", ".")
    command = [sys.executable, "-m", "pypiserver", *map(str, words), "--disable-fallback", str(folder)]
    log = folder.with_name("index.log")
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as server:
        made = Index(f"http://127.0.0.1:{port}", run)
        try:
            end = time.monotonic() + 60
            while True:
                try:
                    made.names()
                    break
                except OSError:
                    assert server.poll() is None and time.monotonic() < end, log.read_text()
                    time.sleep(0.1)
            yield made
        finally:
            server.terminate()


def test_every_wheel_and_source_passes_the_checks_of_an_upload(built: list[Path], run: Run) -> None:
    versions = {path.name.removesuffix(".tar.gz").split("-")[1] for path in built}
    assert len(versions) == 1 and len(built) % 2 == 0
    run(*TWINE, "check", "--strict", *built)


def test_a_wheel_that_is_built_from_a_source_is_the_wheel(built: list[Path], run: Run, uv: str, tmp_path: Path) -> None:
    """Of three dists: a package with data, a plugin, and one that is only a name."""
    for name in ("unirl_quickstart", "unirl_model_wan", "unirl_model_wan22"):
        (source,) = (path for path in built if path.name.startswith(f"{name}-") and path.suffix == ".gz")
        (wheel,) = (path for path in built if path.name.startswith(f"{name}-") and path.suffix == ".whl")
        run(uv, "build", "--wheel", "--quiet", "--out-dir", tmp_path, source)
        assert contents(tmp_path / wheel.name) == contents(wheel)


def contents(wheel: Path) -> dict[str, bytes]:
    """Its files but for the two that name the version of the build backend, which differs from that inside uv."""
    with zipfile.ZipFile(wheel) as file:
        return {name: file.read(name) for name in file.namelist() if not name.endswith((".dist-info/WHEEL", "/RECORD"))}


@pytest.mark.nightly
def test_users_install_from_the_index_and_an_author_publishes_there(
    built: list[Path], index: Index, run: Run, uv: str, tmp_path: Path
) -> None:
    index.upload(*built)
    ours = {
        tomllib.loads(path.read_text(encoding="utf-8"))["project"]["name"]
        for path in (*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("plugins/*/*/pyproject.toml"))
    }
    assert index.names() == ours

    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / "bootstrap.py")
    assert spec is not None and spec.loader is not None
    bootstrap = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bootstrap)
    listed = run(uv, "pip", "freeze", "--python", sys.executable, "--exclude-editable").stdout
    (tmp_path / "pins.txt").write_text("".join(f"{one}\n" for one in listed.splitlines() if "unirl" not in one))
    links = [part for place in bootstrap._find_links() for part in ("--find-links", place)]
    backend = [] if links or ("torch==2" in listed and "+cpu" not in listed) else ["--torch-backend", "cpu"]
    environment = tmp_path / "venv"
    run(uv, "venv", "--quiet", "--python", sys.executable, environment)
    own = {"VIRTUAL_ENV": str(environment), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    own["PATH"] = f"{environment / 'bin'}:{Path(uv).parent}:/usr/local/bin:/usr/bin:/bin"

    def install(*names: str) -> None:
        where = ("--index", f"{index.url}/simple/", "--constraint", tmp_path / "pins.txt", *links, *backend)
        run(uv, "pip", "install", "--quiet", *where, *names, cwd=tmp_path, **own)

    def command(*words: object, cwd: Path = tmp_path) -> str:
        return run(*words, cwd=cwd, **own).stdout

    # The line of the README's readers, and no more than it asks for.
    install("unirl-core", "unirl-model-wan22", "unirl-engine-vllm-omni")
    parts = json.loads(command("unirl", "plugins", "--json"))["parts"]
    assert {("model", "wan22"), ("engine", "vllm-omni")} <= {(one["kind"], one["name"]) for one in parts}
    assert {one["dist"] for one in parts} <= ours and not [one for one in parts if one["kind"] == "reward"]
    found = json.loads(command("unirl", "plugins", "search", "brightness", "--json"))["parts"]
    assert [one["get"] for one in found] == ["install it: `pip install unirl-reward-rules`"]

    # An author: a project, its claims, its upload; and a user who installs it and tests it again.
    install("unirl-new")
    command("unirl", "new", "reward", "warmth")
    source = tmp_path / "unirl-reward-warmth"
    command(uv, "build", "--quiet", cwd=source)
    files = sorted((source / "dist").iterdir())
    run(*TWINE, "check", "--strict", *(path for path in files if path.suffix in (".whl", ".gz")))
    index.upload(*(path for path in files if path.suffix in (".whl", ".gz")))
    install("unirl-reward-warmth", "unirl-conformance")
    command("unirl", "conformance", "--plugin", "unirl-reward-warmth", "--report", "report")
    outcomes = load(tmp_path / "report" / "conformance.json").outcomes
    passed = {(one.kind, one.subject) for one in outcomes if one.state == "pass"}
    assert {("reward", "warmth"), ("plugin", "unirl-reward-warmth")} <= passed
    assert not [one for one in outcomes if one.state == "fail"]
    missing = command(
        "bash", "-c", "unirl registry validate unirl-reward-warmth --report report/conformance.json; test $? = 1"
    )
    assert [line.split(":")[0] for line in missing.splitlines()] == [
        "- Its metadata names no author or maintainer",
        "- Its metadata has no https home page",
    ]
