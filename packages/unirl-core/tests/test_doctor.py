"""`unirl doctor` and `unirl plugins`: what is wrong is named with its file, its dist and the way out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner
from unirl.core import doctor
from unirl.core.catalog import Catalog
from unirl.core.cli.doctor import command as doctor_command
from unirl.core.cli.plugins import command as plugins_command
from unirl.core.doctor import diagnose, find_shadows, find_unmet
from unirl.core.hookspec import hookimpl
from unirl.core.spec import TrackerSpec


def make_dist(
    folder: Path, name: str, version: str = "1.0", *, requires: tuple[str, ...] = (), files: str = ""
) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {line}" for line in requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (info / "RECORD").write_text(files, encoding="utf-8")


def notes(**changed: Any) -> SimpleNamespace:
    fields = {"name": "notes", "summary": "Notes.", "build": "json:loads", "config": "json:gone", **changed}
    return SimpleNamespace(unirl_trackers=hookimpl(lambda: [TrackerSpec(**fields)]))


@pytest.mark.parametrize("file", ["unirl/__init__.py", "unirl/models/__init__.py", "unirl.py", "unirl/rewards.py"])
def test_a_file_that_shadows_the_namespace_is_named_with_its_dist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).touch()
    make_dist(tmp_path, "greedy-pack", files=f"{file},,\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    (found,) = find_shadows([str(tmp_path)])
    namespace = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    assert found.startswith(f"{tmp_path / file} makes {namespace!r} a plain module")
    assert found.endswith("It belongs to greedy-pack 1.0: uninstall that.")


def test_an_editable_dist_that_shadows_the_namespace_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, source = tmp_path / "site", tmp_path / "source"
    (source / "unirl").mkdir(parents=True)
    (source / "unirl" / "__init__.py").touch()
    make_dist(site, "greedy-pack", files="_greedy.pth,,\n")
    (site / "_greedy.pth").write_text(f"{source}\n", encoding="utf-8")
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])
    (found,) = find_shadows([str(source), str(source)])
    assert found.endswith("It belongs to greedy-pack 1.0: uninstall that.")


def test_a_file_that_no_dist_owns_is_to_be_deleted(tmp_path: Path) -> None:
    (tmp_path / "unirl").mkdir()
    (tmp_path / "unirl" / "__init__.py").touch()
    (found,) = find_shadows([str(tmp_path), str(tmp_path / "gone"), str(tmp_path / "unirl" / "__init__.py")])
    assert found.endswith("No dist owns it: delete it.")


def test_nothing_shadows_the_workspace() -> None:
    assert list(find_shadows(sys.path)) == []


def test_bounds_that_are_not_met_are_found_through_what_is_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    make_dist(tmp_path, "our-part", requires=("Middle_Pack[fast]>=1", "absent-pack>=2; python_version < '2'"))
    make_dist(tmp_path, "middle-pack", requires=("low-pack>=3,<4", "gone-pack; extra == 'fast'", "x; extra == 'slow'"))
    make_dist(tmp_path, "low-pack", "2.5", requires=("middle-pack",))
    assert sorted(find_unmet(["our-part"])) == [
        "middle-pack 1.0 requires gone-pack; it is not installed. Install it: `pip install 'gone-pack'`.",
        "middle-pack 1.0 requires low-pack<4,>=3; installed is 2.5. Install one that fits: `pip install 'low-pack<4,>=3'`.",
    ]


def test_a_python_that_a_dist_does_not_take_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    make_dist(tmp_path, "old-pack")
    metadata = tmp_path / "old_pack-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text(encoding="utf-8") + "Requires-Python: <3\n", encoding="utf-8")
    (found,) = find_unmet(["old-pack"])
    assert found.startswith("old-pack 1.0 requires Python <3; this is Python 3.")


def test_a_healthy_environment_gives_facts_and_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_ours", lambda owners: set[str]())
    monkeypatch.setattr(doctor, "LOW_DISK_BYTES", 0)
    found = diagnose(Catalog.of({"unirl-notes": notes()}), folder=tmp_path)
    assert (found.findings, found.exit_code) == ((), 0)
    assert found.facts["torch"]["threads"] >= 1
    assert found.facts["plugins"][0]["status"] == "loaded"
    json.dumps(found.facts)


def test_a_full_disk_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_ours", lambda owners: set[str]())
    monkeypatch.setattr(doctor, "LOW_DISK_BYTES", 2**80)
    found = diagnose(Catalog.of({}), folder=tmp_path)
    assert found.exit_code == 1
    assert [finding.check for finding in found.findings] == ["disk"]


def test_a_plugin_that_did_not_load_counts_most(tmp_path: Path) -> None:
    catalog = Catalog.of({"unirl-a": notes(), "unirl-b": notes(), "unirl-c": SimpleNamespace()})
    found = diagnose(catalog, folder=tmp_path)
    assert found.exit_code == 3
    checks = [finding.check for finding in found.findings]
    assert (checks.count("plugin"), checks.count("conflict")) == (1, 2)


def run(command: click.Command, catalog: Catalog, monkeypatch: pytest.MonkeyPatch, *args: str) -> tuple[int, str]:
    monkeypatch.setattr(Catalog, "discover", classmethod(lambda cls: catalog))
    result = CliRunner().invoke(command, args)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout


def test_doctor_prints_one_json_document(monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = Catalog.of({"unirl-c": SimpleNamespace()})
    code, out = run(doctor_command, catalog, monkeypatch, "--json")
    document = json.loads(out)
    assert code == document["exit_code"] == 3
    assert document["findings"][0]["check"] == "plugin"


def test_doctor_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out = run(doctor_command, Catalog.of({"unirl-c": SimpleNamespace()}), monkeypatch)
    assert code == 3
    assert "'unirl-c' (unirl-c 0) is broken: it implements no hook" in out


def test_plugins_lists_parts_and_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = Catalog.of({"unirl-notes": notes(), "unirl-c": SimpleNamespace()})
    code, out = run(plugins_command, catalog, monkeypatch)
    assert code == 3
    assert "notes" in out and "plugin unirl-c (unirl-c 0) is broken: it implements no hook" in out


def test_plugins_as_json_can_be_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out = run(plugins_command, Catalog.of({"unirl-notes": notes()}), monkeypatch, "--json", "--kind", "model")
    document = json.loads(out)
    assert (code, document["parts"], document["plugins"][0]["name"]) == (0, [], "unirl-notes")


def test_plugins_check_finds_a_spec_that_claims_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = Catalog.of({"unirl-notes": notes()})
    code, out = run(plugins_command, catalog, monkeypatch, "--check", "--json")
    problems = [problem["problem"] for problem in json.loads(out)["problems"]]
    assert code == 1
    assert len(problems) == 1 and "there is no 'gone' in it" in problems[0]
    assert run(plugins_command, catalog, monkeypatch)[0] == 0


def test_an_unknown_kind_is_wrong_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(plugins_command, Catalog.of({}), monkeypatch, "--kind", "modle")[0] == 2


def test_the_command_line_runs_it() -> None:
    code = "from unirl.core.cli import main; main(['plugins', '--json'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    document = json.loads(done.stdout)
    loaded = all(plugin["status"] == "loaded" for plugin in document["plugins"])
    assert document["parts"]
    assert done.returncode == (0 if loaded else 3), done.stderr
