"""`unirl conformance`: what it prints, what it writes, its exit codes, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest
from unirl.conformance.claims import claim_kinds
from unirl.conformance.report.file import SCHEMA, load, to_json
from unirl.conformance.report.write import write_reports
from unirl.conformance.results import Report
from unirl.core.cli import main
from unirl.core.plugins.entry_points import installed_dists

sys.path.insert(0, str(Path(__file__).parent))

from report_samples import rich_report, small_report

pytestmark = pytest.mark.slow

Cli = Callable[..., tuple[int, str, str]]
STATIC = ("--tier", "static", "--plugin", "unirl-tools")
"""The quickest run that there is: no part is built."""
CLAIM = "the-plugin-loads"
"""A claim about plugins that takes a millisecond."""


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run `unirl conformance`: (exit code, stdout, stderr)."""

    def run(*args: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(["conformance", *map(str, args)])
        out = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, out.out, out.err

    return run


def saved(report: Report, folder: Path, name: str = "conformance.json") -> Path:
    path = folder / name
    path.write_text(to_json(report), encoding="utf-8")
    return path


def test_static_claims_run_and_all_reports_are_written(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    code, out, _ = cli(*STATIC, "--report", folder)
    report = load(folder / "conformance.json")
    assert code == report.exit_code
    assert {outcome.subject for outcome in report.outcomes} == {"unirl-tools"}
    assert {claim_kinds()[claim.name] for claim in report.claims} == {"plugin"}
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert names == {"conformance.json", "conformance.html", "MATRIX.md", "junit.xml"}
    suite = ElementTree.parse(folder / "junit.xml").getroot()
    # Claims about plugins find out themselves where they do not apply.
    assert len(list(suite.iter("testcase"))) == len(report.outcomes) + report.count("n/a")
    assert f"wrote {folder / 'MATRIX.md'}" in out
    assert f"{report.count('pass')} pass" in out


def test_json_is_all_that_stands_on_stdout_and_progress_is_on_stderr(cli: Cli) -> None:
    code, out, err = cli(*STATIC, "--json", "--claim", CLAIM)
    result = json.loads(out)
    assert (code, result["schema"]) == (0, SCHEMA)
    assert result["selection"] == ["--plugin=unirl-tools", f"--claim={CLAIM}"]
    assert result["results"] == {"cpu": {"plugin": {"unirl-tools": {CLAIM: "pass"}}}}
    test = CLAIM.replace("-", "_")
    assert re.search(rf"^test_plugin\w*\.py::test_{test}\[unirl-tools\] PASSED +\[100%\]$", err, re.MULTILINE)
    code, out, err = cli(*STATIC, "--claim", CLAIM)
    assert code == 0 and "PASSED" not in out and "PASSED" in err


def test_a_claim_is_left_out_by_name(cli: Cli) -> None:
    outcomes = [
        json.loads(cli(*STATIC, "--json", *more)[1])["results"]["cpu"]["plugin"]["unirl-tools"]
        for more in ((), ("--without", CLAIM))
    ]
    assert outcomes[0].keys() - outcomes[1].keys() == {CLAIM}


def test_claims_that_do_not_apply_are_counted(cli: Cli) -> None:
    _, out, _ = cli(*STATIC, "--json")
    result = json.loads(out)
    (outcomes,) = result["results"]["cpu"]["plugin"].values()
    (untried,) = result["untried"]
    assert untried["state"] == "n/a" and untried["num_claims"] > 0
    assert untried["num_claims"] + len(outcomes) == len(result["claims"]["plugin"])


def test_static_claims_import_nothing_heavy_and_nothing_of_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    for folder in (tmp_path, tmp_path / "tests"):
        (folder / "conftest.py").write_text("raise RuntimeError('conftest.py of the current folder was imported')\n")
    code = (
        "import sys\n"
        "from unirl.core.cli import main\n"
        f"try: main(['conformance', *{STATIC!r}, '--claim', {CLAIM!r}])\n"
        "except SystemExit as stop: assert stop.code == 0, stop.code\n"
        "heavy = {'torch', 'ray', 'transformers', 'diffusers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, cwd=tmp_path)


def test_an_engine_that_is_known_and_not_installed_gets_its_install_line(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = installed_dists()
    others = [dist for dist in installed if dist.identity[0] != "unirl-engine-vllm-omni"]
    assert len(others) < len(installed)
    monkeypatch.setattr("unirl.core.plugins.loading.installed_dists", lambda: others)
    monkeypatch.setattr("unirl.core.plugins.entry_points.installed_dists", lambda: others)
    code, out, err = cli("--engine", "vllm-omni")
    assert (code, out) == (3, "")
    assert "engine 'vllm-omni' is not installed" in err
    assert "unirl-engine-vllm-omni" in err


def test_an_engine_whose_environment_is_absent_gets_the_command_that_makes_it(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIRL_ENVS", str(tmp_path))
    code, out, err = cli("--engine", "vllm")
    assert (code, out) == (3, "")
    assert "engine 'vllm' needs its own environment" in err and "`unirl engine-env vllm --accel cpu`" in err
    # Claims that start nothing need none.
    assert cli("--engine", "vllm", "--tier", "static", "--claim", CLAIM)[0] == 0


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (("--engine", "trainsid"), "did you mean 'trainside'?"),
        (("--plugin", "unirl-model-sd"), "did you mean 'unirl-model-sd3'?"),
        (("--claim", "importing-it-is-lightt"), "did you mean 'importing-it-is-light'?"),
        (("--claim", "xyzzy"), "`unirl conformance --claims` lists them"),
        (("--without", "xyzzy"), "'xyzzy', which is neither a subject nor a claim"),
        (("--tier", "tinny"), "'tiny'"),
        (("trainside",), "--engine trainside"),
        (("--claims", "--model", "sd3"), "--claims runs nothing, so --model has no effect with it"),
    ],
)
def test_a_wrong_name_is_wrong_use(cli: Cli, args: tuple[str, ...], hint: str) -> None:
    code, out, err = cli(*args)
    assert (code, out) == (2, "")
    assert hint in err


def test_what_matches_nothing_is_wrong_use(cli: Cli) -> None:
    name = next(name for name, kind in claim_kinds().items() if kind == "reward")
    code, _, err = cli(*STATIC, "--claim", name)
    assert code == 2
    assert "nothing matches the selection at tier static" in err
    assert f"{name!r} is of tier" in err


def test_flags_of_pytest_go_after_two_dashes(cli: Cli) -> None:
    code, out, err = cli(*STATIC, "--", "--no-such-flag")
    assert code == 2
    assert "--no-such-flag" in out + err
    code, out, _ = cli(*STATIC, "--json", "--", "-k", CLAIM.replace("-", "_"))
    assert code == 0
    assert json.loads(out)["results"]["cpu"]["plugin"]["unirl-tools"].keys() == {CLAIM}


def test_someone_who_stops_it_sees_no_traceback(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "someone_stops.py").write_text("def pytest_runtest_call(item):\n    raise KeyboardInterrupt\n")
    monkeypatch.syspath_prepend(tmp_path)
    code, out, err = cli(*STATIC, "--", "-p", "someone_stops")
    assert code == 130
    assert err.endswith("stopped\n")
    assert "Traceback" not in out + err


def test_a_run_that_is_stopped_leaves_its_reports(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stops = "seen = []\ndef pytest_runtest_call(item):\n    seen.append(item)\n    if len(seen) == 4:\n"
    (tmp_path / "stops_at_the_fourth.py").write_text(f"{stops}        raise KeyboardInterrupt\n")
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "out"
    code, _, err = cli(*STATIC, "--report", folder, "--", "-p", "stops_at_the_fourth")
    report = load(folder / "conformance.json")
    assert (code, report.exit_code) == (130, 0)
    assert f"wrote {folder / 'conformance.json'}" in err and err.endswith("stopped\n")
    left = [outcome for outcome in report.outcomes if outcome.state == "not run"]
    assert {outcome.reason for outcome in left} == {"the run was stopped before it was tried"}
    assert report.count("pass") >= 1 and report.count("fail") == 0
    assert len(left) == len(report.claims) - 3


def test_claims_are_listed_with_their_meaning(cli: Cli) -> None:
    code, out, _ = cli("--claims", "--json")
    listed = {one["name"]: one for one in json.loads(out)}
    assert code == 0
    assert listed.keys() == claim_kinds().keys()
    assert all(one["meaning"] for one in listed.values())
    assert any(one["proves"] == ["sigmas"] for one in listed.values())
    code, out, _ = cli("--claims")
    assert code == 0 and all(name in out for name in listed)


@pytest.mark.parametrize(
    ("states", "expected"), [(("pass",), 0), (("pass", "fail"), 1), (("not run",), 3), (("gap", "not run"), 0)]
)
def test_a_report_that_was_kept_is_shown_again(
    cli: Cli, tmp_path: Path, states: tuple[str, ...], expected: int
) -> None:
    report = small_report(*states)  # pyright: ignore[reportArgumentType]
    code, out, _ = cli("--from", saved(report, tmp_path))
    assert code == expected
    assert ", ".join(f"{report.count(s)} {s}" for s in ("pass", "fail", "gap", "not run", "n/a")) in out


def test_a_report_that_was_kept_makes_the_other_reports_again(cli: Cli, tmp_path: Path) -> None:
    report = rich_report()
    kept = saved(report, tmp_path)
    code, out, err = cli("--from", kept, "--json", "--report", tmp_path / "out")
    assert code == 1
    assert out == to_json(report)
    assert err.count("wrote ") == 3
    write_reports(load(kept), tmp_path / "expected")
    for path in (tmp_path / "expected").rglob("*.*"):
        assert (tmp_path / "out" / path.relative_to(tmp_path / "expected")).read_bytes() == path.read_bytes()


def test_what_would_be_ignored_with_a_kept_report_is_refused(cli: Cli, tmp_path: Path) -> None:
    kept = saved(small_report("pass"), tmp_path)
    for args, given in (
        (("--model", "sd3"), "--model"),
        (("--tier", "tiny"), "--tier"),
        (("--", "-n", "2"), "flags of pytest"),
    ):
        code, _, err = cli("--from", kept, *args)
        assert code == 2
        assert f"--from runs nothing, so {given} has no effect with it" in err


def test_what_is_no_report_is_wrong_use(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "conformance.json"
    path.write_text("{}")
    code, _, err = cli("--from", path)
    assert code == 2 and "not a conformance.json that can be read" in err


def test_something_that_got_worse_is_a_failure(cli: Cli, tmp_path: Path) -> None:
    good, bad = saved(small_report("pass"), tmp_path, "good.json"), saved(small_report("not run"), tmp_path, "bad.json")
    code, out, _ = cli("--from", bad, "--diff", good)
    assert code == 1
    assert "✓ pass -> ○ not run  claim-0 on model sd3" in out
    code, out, _ = cli("--from", good, "--diff", bad)
    assert code == 0 and "0 worse, 1 better, 0 other." in out
    code, out, err = cli("--from", bad, "--diff", good, "--json")
    assert code == 1 and "1 worse" in err
    assert out == to_json(small_report("not run"))


def test_the_report_that_is_written_over_is_compared_before(cli: Cli, tmp_path: Path) -> None:
    kept = saved(small_report("pass"), tmp_path)
    new = saved(small_report("fail"), tmp_path, "new.json")
    code, out, _ = cli("--from", new, "--diff", kept, "--report", tmp_path)
    assert code == 1 and "1 worse" in out
    assert kept.read_text() == to_json(small_report("fail"))


def test_only_what_was_selected_is_compared(cli: Cli, tmp_path: Path) -> None:
    code, out, _ = cli(*STATIC, "--diff", saved(rich_report(), tmp_path))
    assert code == 0
    assert "outcomes of the given report are outside of this run" in out and "0 worse" in out
