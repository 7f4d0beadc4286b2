"""Checks of `unirl registry validate` on an installed dist. With real wheels: tests/test_release.py."""

from __future__ import annotations

import base64
import hashlib
import json
import tomllib
from dataclasses import replace
from importlib.metadata import Distribution
from pathlib import Path
from types import SimpleNamespace

import pytest
from unirl.conformance.claims import all_claims
from unirl.conformance.environment import describe_environment
from unirl.conformance.report.file import to_json
from unirl.conformance.results import Outcome, PartInfo, Report, SubjectInfo
from unirl.core.cli import main
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.hookspec import hookimpl
from unirl.core.plugins.registry import KnownPart, Registry, read_registry
from unirl.core.specs.spec import RewardSpec
from unirl.new.registry import entries, problems, report_problems

SPEC = RewardSpec(name="taste", summary='How "tasty" an image is', build="m:b", config="m:C", scale="s", media="image")
METADATA = """Metadata-Version: 2.4
Name: Acme_Taste
Version: 1.2
Author-email: Ada Example <ada@example.org>
License-Expression: MIT
Project-URL: Issues, https://example.org/issues
Project-URL: Homepage, https://example.org/taste
Requires-Dist: unirl-core<0.2,>=0.1
"""
SOURCE = "print('tasty')\n"
NONE_KNOWN = Registry([])


def installed(
    root: Path, metadata: str = METADATA, *, name: str = "acme_taste", package: str = "taste"
) -> Distribution:
    """A dist as an installer leaves it: one module, and a record with its digest."""
    (root / package).mkdir(parents=True, exist_ok=True)
    (root / package / "reward.py").write_text(SOURCE)
    digest = base64.urlsafe_b64encode(hashlib.sha256(SOURCE.encode()).digest()).decode().rstrip("=")
    info = root / f"{name}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(metadata)
    (info / "RECORD").write_text(f"{package}/reward.py,sha256={digest},{len(SOURCE)}\n{info.name}/METADATA,,\n")
    return Distribution.at(info)


def catalog(*specs: RewardSpec) -> Catalog:
    return Catalog.of({"acme-taste": SimpleNamespace(unirl_rewards=hookimpl(lambda: list(specs)))}, version="1.2")


def test_a_dist_without_problems_gets_its_lines(tmp_path: Path) -> None:
    dist = installed(tmp_path)
    parts = catalog(replace(SPEC, name="zest"), SPEC)
    assert list(problems(dist, catalog=parts, registry=NONE_KNOWN)) == []
    tables = entries(dist, catalog=parts)
    lines = tables["reward"]
    assert set(tables) == {"reward"} and [line.split(" ")[0] for line in lines] == ["taste", "zest"]
    registry = read_registry(tomllib.loads("[reward]\n" + "\n".join(lines)))
    assert registry.part("reward", "taste") == KnownPart(
        kind="reward",
        name="taste",
        dist="acme-taste",
        by="Ada Example",
        home="https://example.org/taste",
        summary='How "tasty" an image is.',
    )


def test_a_later_release_of_a_listed_dist_keeps_its_name(tmp_path: Path) -> None:
    known = Registry([KnownPart(kind="reward", name="taste", dist="acme-taste", summary="s")])
    assert list(problems(installed(tmp_path), catalog=catalog(SPEC), registry=known)) == []


def test_a_name_of_somebody_else_is_refused(tmp_path: Path) -> None:
    known = Registry([KnownPart(kind="reward", name="taste", dist="first-taste", summary="s")])
    (problem,) = problems(installed(tmp_path), catalog=catalog(SPEC), registry=known)
    assert problem == "The reward 'taste' is that of first-taste in the registry. Choose another name."


@pytest.mark.parametrize(
    ("without", "says"),
    [
        ("Author-email", "names no author or maintainer"),
        ("Project-URL", "no https home page"),
        ("License-Expression", "has no licence"),
        ("Requires-Dist", "does not depend on unirl-core"),
    ],
)
def test_metadata_that_is_missing_is_named(tmp_path: Path, without: str, says: str) -> None:
    text = "".join(line for line in METADATA.splitlines(keepends=True) if not line.startswith(without))
    (problem,) = problems(installed(tmp_path, text), catalog=catalog(SPEC), registry=NONE_KNOWN)
    assert says in problem


@pytest.mark.parametrize("bound", ["unirl-core", "unirl-core>=0.1", "unirl-core!=0.1.3"])
def test_any_later_core_is_too_many(tmp_path: Path, bound: str) -> None:
    text = METADATA.replace("unirl-core<0.2,>=0.1", bound)
    (problem,) = problems(installed(tmp_path, text), catalog=catalog(SPEC), registry=NONE_KNOWN)
    assert "Bound it" in problem and bound in problem


def test_a_home_page_is_preferred_to_other_pages_and_has_https(tmp_path: Path) -> None:
    text = METADATA.replace("https://example.org/taste", "http://example.org/taste")
    (line,) = entries(installed(tmp_path, text), catalog=catalog(SPEC))["reward"]
    assert 'home = "https://example.org/issues"' in line


def test_an_author_in_two_fields_is_named_once(tmp_path: Path) -> None:
    text = METADATA.replace("Author-email:", "Author: Ada Example\nAuthor-email: grace@example.org,")
    (line,) = entries(installed(tmp_path, text), catalog=catalog(SPEC))["reward"]
    assert 'by = "Ada Example, grace@example.org"' in line


def test_an_editable_dist_is_sent_to_its_wheel(tmp_path: Path) -> None:
    dist = installed(tmp_path)
    (tmp_path / "acme_taste-1.2.dist-info" / "direct_url.json").write_text(
        json.dumps({"url": "file:///x", "dir_info": {"editable": True}})
    )
    (problem,) = problems(dist, catalog=catalog(SPEC), registry=NONE_KNOWN)
    assert "editable mode" in problem and "uv build" in problem


def test_files_that_changed_or_are_another_dists_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    dist = installed(tmp_path)
    installed(tmp_path, METADATA.replace("Acme_Taste", "other"), name="other")
    (shared,) = problems(dist, catalog=catalog(SPEC), registry=NONE_KNOWN)
    assert shared == "other==1.2 has files of the same names: taste/reward.py. Move them into a package of your own."
    (tmp_path / "taste" / "reward.py").write_text("print('bland')\n")
    changed, _ = problems(dist, catalog=catalog(SPEC), registry=NONE_KNOWN)
    assert "taste/reward.py" in changed and "Reinstall" in changed


def test_a_dist_without_a_plugin_and_a_broken_one_are_told(tmp_path: Path) -> None:
    dist = installed(tmp_path)
    (problem,) = problems(dist, catalog=Catalog.of({}), registry=NONE_KNOWN)
    assert "unirl.v1" in problem
    broken = Catalog.of({"acme-taste": SimpleNamespace(unirl_rewards=hookimpl(lambda: None))})
    (problem,) = problems(dist, catalog=broken, registry=NONE_KNOWN)
    assert "is broken" in problem
    (problem,) = problems(dist, catalog=catalog(), registry=NONE_KNOWN)
    assert "has no parts" in problem


def test_a_summary_that_is_too_long_is_told_with_its_length(tmp_path: Path) -> None:
    parts = catalog(replace(SPEC, summary="x" * 100))
    (problem,) = problems(installed(tmp_path), catalog=parts, registry=NONE_KNOWN)
    assert "has 101 characters with its full stop, expected at most 100" in problem


@pytest.fixture
def report() -> Report:
    claim = all_claims(["reward"])[0]
    part = PartInfo(kind="reward", name="taste", dist="acme-taste", tracks=())
    return Report(
        created="2026-01-01T00:00:00Z",
        tier="tiny",
        selection=("--plugin=acme-taste",),
        environment=describe_environment(Catalog.of({})),
        dists={"acme-taste": "1.2"},
        seconds=1.0,
        claims=(claim,),
        subjects=(SubjectInfo(kind="reward", device="cpu", parts=(part,)),),
        outcomes=(Outcome(claim=claim.name, subject="taste", kind="reward", state="pass"),),
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, ""),
        ({"dists": {"acme-taste": "1.1"}}, "is about Acme_Taste 1.1, not 1.2"),
        ({"dists": {}}, "that was not installed"),
        ({"selection": ("--plugin=acme-taste", "--claim=x")}, "nothing else"),
        ({"tier": "static"}, "runs nothing"),
        ({"outcomes": ()}, "no claim passed"),
    ],
)
def test_a_report_is_whole_and_of_this_version(
    tmp_path: Path, report: Report, change: dict[str, object], says: str
) -> None:
    dist, file = installed(tmp_path), tmp_path / "conformance.json"
    file.write_text(to_json(replace(report, **change)))
    found = list(report_problems(dist, file))
    assert len(found) == bool(says) and all(says in one for one in found)


def test_claims_that_failed_are_named(tmp_path: Path, report: Report) -> None:
    file = tmp_path / "conformance.json"
    failed = replace(report.outcomes[0], state="fail", reason="r")
    file.write_text(to_json(replace(report, outcomes=(failed,))))
    assert list(report_problems(installed(tmp_path), file)) == [f"Claims failed: {failed.claim}."]


def test_the_command_ends_with_one_for_problems_and_knows_what_is_absent(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["registry", "validate", "unirl-reward-rules"])
    assert caught.value.code == 1 and "editable mode" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(["registry", "validate", "nobody-knows"])
    assert caught.value.code == 3 and "is not installed. Build its wheel" in capsys.readouterr().err
