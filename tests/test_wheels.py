"""The wheels: what is in them, and that they alone, in an empty environment, train."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from siblings import with_siblings

pytestmark = pytest.mark.whole_tree

ROOT = Path(__file__).parents[1]
Run = Callable[..., subprocess.CompletedProcess[str]]
NAMESPACES = (
    "",
    "models/",
    "engines/",
    "backends/",
    "algorithms/",
    "rewards/",
    "trackers/",
    "transports/",
    "launchers/",
)


def test_every_dist_of_the_workspace_builds(wheels: dict[str, Path]) -> None:
    members = [*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("plugins/*/*/pyproject.toml")]
    assert len(wheels) == len(members)


def test_the_core_carries_the_public_list_of_plugins(wheels: dict[str, Path]) -> None:
    carried = zipfile.ZipFile(wheels["unirl-core"]).read("unirl/core/registry.toml")
    assert carried == (ROOT / "registry" / "plugins.toml").read_bytes()


def test_conformance_carries_its_templates(wheels: dict[str, Path]) -> None:
    inside = zipfile.ZipFile(wheels["unirl-conformance"])
    package = ROOT / "packages/unirl-conformance/src"
    folder = package / "unirl/conformance/scaffold/templates"
    for file in folder.rglob("*"):
        if file.is_file():
            assert inside.read(str(file.relative_to(package))) == file.read_bytes(), file


def test_wheels_leave_the_namespace_open_and_carry_types_and_licence(wheels: dict[str, Path]) -> None:
    licence = (ROOT / "LICENSE").read_bytes()
    for name, path in wheels.items():
        wheel = zipfile.ZipFile(path)
        inside = wheel.namelist()
        shadowing = {f"unirl/{namespace}__init__.py" for namespace in NAMESPACES} & set(inside)
        assert not shadowing, f"{name} ships {shadowing}, which would hide every other dist"
        assert any(entry.endswith("/py.typed") for entry in inside), f"{name} ships no py.typed"
        licences = [wheel.read(entry) for entry in inside if entry.endswith("licenses/LICENSE")]
        assert licences == [licence], f"{name} ships no licence, or another one"
        strays = {entry.split("/")[0] for entry in inside} - {"unirl"}
        assert all(stray.endswith(".dist-info") for stray in strays), f"{name} ships {strays} beside the namespace"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_wheels_alone_train_two_steps_in_an_empty_environment(
    wheels: dict[str, Path], run: Run, uv: str, tmp_path: Path
) -> None:
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / "bootstrap.py")
    assert spec is not None and spec.loader is not None
    bootstrap = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bootstrap)

    python = tmp_path / "venv" / "bin" / "python"
    run(uv, "venv", "--quiet", "--python", sys.executable, tmp_path / "venv")
    # The versions under test, torch's build included; what the wheels need is for the wheels to say.
    listed = run(uv, "pip", "freeze", "--python", sys.executable, "--exclude-editable").stdout
    pins = tmp_path / "pins.txt"
    pins.write_text("".join(line + "\n" for line in listed.splitlines() if not line.startswith("unirl")))
    links = [part for place in bootstrap._find_links() for part in ("--find-links", place)]
    backend = [] if links or ("torch==2" in listed and "+cpu" not in listed) else ["--torch-backend", "cpu"]
    run(
        *(uv, "pip", "install", "--quiet", "--python", python, "--constraint", pins, *links, *backend),
        *(wheels[name] for name in with_siblings("unirl-quickstart")),
    )
    home = tmp_path / "elsewhere"
    home.mkdir()
    origin = run(python, "-c", "import unirl.core; print(unirl.core.__file__)", cwd=home).stdout
    assert str(tmp_path) in origin, "the test must run the wheels, not the checkout"
    run(
        *(python, "-m", "unirl.core", "train", "quickstart", "run.max_steps=2", "run.dir=out", "eval.num_prompts=4"),
        cwd=home,
        HF_HUB_OFFLINE="1",
    )
    events = [json.loads(line) for line in (home / "out" / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["kind"] == "step"] == [1, 2]
    assert events[-1]["status"] == "done"
