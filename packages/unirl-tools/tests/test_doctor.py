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
from unirl.core.cli.plugins import command as plugins_command
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.dists import find_unmet
from unirl.core.plugins.hookspec import hookimpl
from unirl.core.plugins.installed_files import find_shadows
from unirl.core.specs.spec import TrackerSpec
from unirl.tools import doctor
from unirl.tools.doctor import diagnose
from unirl.tools.doctor_command import command as doctor_command


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
    (result,) = find_shadows([str(tmp_path)])
    namespace = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    assert result.startswith(f"{tmp_path / file} makes {namespace!r} a plain module")
    assert result.endswith("It belongs to greedy-pack 1.0: uninstall it: `pip uninstall greedy-pack`.")


def test_an_editable_dist_that_shadows_the_namespace_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, source = tmp_path / "site", tmp_path / "source"
    (source / "unirl").mkdir(parents=True)
    (source / "unirl" / "__init__.py").touch()
    make_dist(site, "greedy-pack", files="_greedy.pth,,\n")
    (site / "_greedy.pth").write_text(f"{source}\n", encoding="utf-8")
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])
    (result,) = find_shadows([str(source), str(source)])
    assert result.endswith("It belongs to greedy-pack 1.0: uninstall it: `pip uninstall greedy-pack`.")


def test_a_file_that_no_dist_owns_is_to_be_deleted(tmp_path: Path) -> None:
    (tmp_path / "unirl").mkdir()
    (tmp_path / "unirl" / "__init__.py").touch()
    (result,) = find_shadows([str(tmp_path), str(tmp_path / "gone"), str(tmp_path / "unirl" / "__init__.py")])
    assert result.endswith("No dist owns it: delete it.")


def test_files_are_compared_with_the_records_of_their_dists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sha256 of nothing, as RECORD files have it."""
    empty = "sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU"
    files = "".join(f"unirl/{name}.py,{empty},0\n" for name in ("kept", "changed", "gone"))
    make_dist(tmp_path, "unirl-part", files=f"{files}../bin/tool,{empty},0\n")
    make_dist(tmp_path, "other-part", files=files)
    (tmp_path / "unirl").mkdir()
    (tmp_path / "unirl" / "kept.py").touch()
    (tmp_path / "unirl" / "changed.py").write_text("1")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr(doctor, "LOW_DISK_BYTES", 0)
    result = diagnose(Catalog.of({}), folder=tmp_path)
    (finding,) = [one for one in result.findings if one.check == "files"]
    assert result.exit_code == 1
    assert "by the records of unirl-part (unirl/changed.py and 1 more). Reinstall: " in finding.text
    assert "`pip install --force-reinstall --no-deps unirl-part==1.0`" in finding.text


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
        "middle-pack 1.0 requires low-pack<4,>=3; installed is 2.5. Install a matching one: `pip install 'low-pack<4,>=3'`.",
    ]


def test_a_python_that_a_dist_does_not_take_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    make_dist(tmp_path, "old-pack")
    metadata = tmp_path / "old_pack-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text(encoding="utf-8") + "Requires-Python: <3\n", encoding="utf-8")
    (result,) = find_unmet(["old-pack"])
    assert result.startswith("old-pack 1.0 requires Python <3; this is Python 3.")


def test_a_healthy_environment_gives_facts_and_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_ours", lambda owners: set[str]())
    monkeypatch.setattr(doctor, "LOW_DISK_BYTES", 0)
    result = diagnose(Catalog.of({"unirl-notes": notes()}), folder=tmp_path)
    assert (result.findings, result.exit_code) == ((), 0)
    assert result.facts["torch"]["threads"] >= 1
    assert result.facts["plugins"][0]["status"] == "loaded"
    json.dumps(result.facts)


def test_a_full_disk_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_ours", lambda owners: set[str]())
    monkeypatch.setattr(doctor, "LOW_DISK_BYTES", 2**80)
    result = diagnose(Catalog.of({}), folder=tmp_path)
    assert result.exit_code == 1
    assert [finding.check for finding in result.findings] == ["disk"]


def test_a_plugin_that_did_not_load_counts_most(tmp_path: Path) -> None:
    catalog = Catalog.of({"unirl-a": notes(), "unirl-b": notes(), "unirl-c": SimpleNamespace()})
    result = diagnose(catalog, folder=tmp_path)
    assert result.exit_code == 3
    checks = [finding.check for finding in result.findings]
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


def test_an_unknown_kind_is_wrong_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(plugins_command, Catalog.of({}), monkeypatch, "--kind", "modle")[0] == 2


def test_the_command_line_runs_it() -> None:
    code = "from unirl.core.cli import main; main(['plugins', '--json'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    document = json.loads(done.stdout)
    loaded = all(plugin["status"] == "loaded" for plugin in document["plugins"])
    assert document["parts"]
    assert done.returncode == (0 if loaded else 3), done.stderr
