"""Plugins from `unirl new`, built and installed: they load, keep the claims about their kind, and pass their tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from unirl.conformance.claims import all_claims
from unirl.conformance.report.file import load
from unirl.conformance.results import Outcome
from unirl.new.kinds import KINDS
from unirl.new.names import Names
from unirl.new.render import render, write

ROOT = Path(__file__).parents[3]
NAMES = [Names.of(kind, "acme") for kind in KINDS]
WITHOUT_A_REFERENCE = {
    "schedule-is-that-of-the-reference-pipeline",
    "final-latents-are-those-of-the-reference-pipeline",
    "guided-latents-are-those-of-the-reference-pipeline",
    "decoded-media-are-those-of-the-reference-pipeline",
}
"""The gap of a new model beside the static one: there is no second implementation of its network."""


def run(*words: object, site: Path | None = None, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "UV_OFFLINE": "1"}
    if site is not None:
        environment["PYTHONPATH"] = str(site)
    return subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one plugin of each kind, and the content of their wheels in `site`."""
    folder = tmp_path_factory.mktemp("plugins")
    own = ROOT / ".uv-bin" / "bin" / "uv"
    uv = shutil.which("uv") or str(own)
    for names in NAMES:
        write(render(names), folder / names.dist)
        built = run(uv, "build", "--wheel", "--quiet", "--out-dir", folder / "wheels", cwd=folder / names.dist)
        assert built.returncode == 0, built.stderr
    for wheel in (folder / "wheels").glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder


@pytest.mark.slow
def test_each_keeps_the_static_claims_at_once(plugins: Path) -> None:
    chosen = [word for names in NAMES for word in ("--plugin", names.dist)]
    done = run(
        *(sys.executable, "-m", "unirl.core", "conformance", *chosen, "--tier", "static", "--report", "static"),
        site=plugins / "site",
        cwd=plugins,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = load(plugins / "static" / "conformance.json").outcomes
    states = {(one.claim, one.subject): one.state for one in outcomes}
    assert {subject for _, subject in states} == {names.dist for names in NAMES}
    assert set(states.values()) <= {"pass", "gap"}
    gaps = {key for key, state in states.items() if state == "gap"}
    assert gaps == {("a-model-brings-its-miniature-and-its-reference", "unirl-model-acme")}


@pytest.fixture(scope="module")
def outcomes(plugins: Path) -> list[Outcome]:
    """Results of the claims about these parts; their many combinations are left to tests/test_third_party.py, and with
    them a whole run that learns. Of the models of the repository the engine is tried with one."""
    claims = tuple(claim.name for claim in all_claims(KINDS) if claim.name != "training-raises-the-reward")
    chosen: list[dict[str, Any]] = [
        {"kinds": tuple(kind for kind in KINDS if kind != "engine"), "claims": claims},
        {"kinds": ("engine",), "names": {"model": ("acme", "sd3")}},
    ]
    code = (
        "from pathlib import Path\n"
        "from unirl.conformance.report.file import to_json\n"
        "from unirl.conformance.run import run_suite\n"
        "from unirl.conformance.subjects import Selection\n"
        f"dists = {tuple(names.dist for names in NAMES)}\n"
        f"reports = [run_suite(Selection(plugins=dists, **one)) for one in {chosen}]\n"
        "for place, report in enumerate(reports): Path(f'{place}.json').write_text(to_json(report))\n"
    )
    done = run(sys.executable, "-c", code, site=plugins / "site", cwd=plugins)
    assert done.returncode == 0, done.stdout + done.stderr
    return [one for place, _ in enumerate(chosen) for one in load(plugins / f"{place}.json").outcomes]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_keeps_the_claims_about_its_kind(outcomes: list[Outcome], kind: str) -> None:
    own = [one for one in outcomes if one.kind == kind and "acme" in one.subject.split("+")]
    wrong = [(one.claim, one.subject, one.reason) for one in own if one.state in ("fail", "not run")]
    assert not wrong
    # There are four claims about environments.
    assert sum(one.state == "pass" for one in own) >= min(5, len(all_claims([kind])))
    gaps = {one.claim for one in own if one.state == "gap"}
    assert gaps == (WITHOUT_A_REFERENCE if kind == "model" else set())


@pytest.mark.slow
def test_the_tests_of_each_pass(plugins: Path) -> None:
    """All but the one that runs the claims, which are tried above."""
    done = run(
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-W", "error"),
        *("--ignore-glob", "*test_conformance.py", "--rootdir", plugins, "-c", "/dev/null"),
        *(plugins / names.dist / "tests" for names in NAMES),
        site=plugins / "site",
        cwd=plugins,
    )
    assert done.returncode == 0, done.stdout
