"""The line that says how far a run is, what it tries and what it waits for."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from unirl.conformance.progress import PRIOR_S, PRIOR_WEIGHT, Progress, Remaining, Status

IDS = [
    "suite/test_model_media.py::test_media_has_the_requested_size[sd3]",
    "suite/test_engine_text.py::test_texts[apart+x]",
]


@pytest.fixture
def progress() -> Progress:
    return Progress(with_programs=["apart+x"], stream=io.StringIO())


def test_claims_to_come_take_as_long_as_those_of_their_group_took() -> None:
    remaining = Remaining()
    for _ in range(10):
        remaining.add(("model", False))
    remaining.add(("engine", True))
    assert remaining.seconds == pytest.approx(10 * PRIOR_S[False] + PRIOR_S[True])
    for _ in range(4):
        remaining.done(("model", False), 7.0)
    mean = (4 * 7.0 + PRIOR_WEIGHT * PRIOR_S[False]) / (4 + PRIOR_WEIGHT)
    assert remaining.seconds == pytest.approx(6 * mean + PRIOR_S[True])


def test_the_line_names_the_claim_and_what_it_waits_for(progress: Progress) -> None:
    progress.pytest_configure()
    try:
        progress.pytest_xdist_node_collection_finished(FakeNode(), IDS)
        assert progress.line() == f"0/2  about {PRIOR_S[False] + PRIOR_S[True]:.0f} s left"
        progress.pytest_runtest_logstart(IDS[0])
        assert progress.line().startswith("0/2  media-has-the-requested-size on model sd3 (")
        progress.pytest_runtest_logfinish(IDS[0])
        progress.pytest_runtest_logstart(IDS[1])
        with Status(progress.folder).busy("starting engine 'apart' with model 'x'"):
            assert "texts on engine apart+x (" in progress.line()
            assert ")  starting engine 'apart' with model 'x'  about " in progress.line()
        assert "starting" not in progress.line()
        assert progress.line().startswith("1/2")
    finally:
        progress.pytest_unconfigure()
    assert progress.folder is not None and not progress.folder.exists()


def test_a_failure_is_shown_when_it_happens_and_counted() -> None:
    stream = io.StringIO()
    progress = Progress(with_programs=["apart+x"], stream=stream)
    progress.pytest_configure()
    try:
        progress.pytest_xdist_node_collection_finished(FakeNode(), IDS)
        for when, outcome in (("setup", "passed"), ("call", "failed"), ("teardown", "failed")):
            report = pytest.TestReport(IDS[1], ("", 0, ""), {}, outcome, None, when)  # type: ignore[arg-type]
            progress.pytest_runtest_logreport(report)
        assert stream.getvalue() == "failed: texts on engine apart+x\n"
        assert progress.line().startswith("0/2  1 failed  ")
    finally:
        progress.pytest_unconfigure()


class FakeNode:
    class gateway:
        id = "gw0"


def test_nobody_has_to_look() -> None:
    with Status().busy("starting"):
        pass


@pytest.mark.parametrize("parallel", [(), ("-n", "2")])
def test_what_a_claim_waits_for_is_shown_while_it_waits(tmp_path: Path, parallel: tuple[str, ...]) -> None:
    """Also from the processes of a parallel run, and through pytest's own capturing."""
    (tmp_path / "slow_start.py").write_text(
        "import time\n"
        "import pytest\n"
        "from unirl.conformance.pytest_plugin import _status\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_runtest_call(item):\n"
        "    with _status(item.config).busy('starting what takes long'):\n"
        "        time.sleep(1.5)\n"
    )
    code = (
        "import sys, unirl.conformance.progress as progress\n"
        "progress.TICK_S = progress.LINE_S = 0.2\n"
        "from unirl.core.cli import main\n"
        "main(['conformance', '--tier', 'static', '--plugin', 'unirl-conformance', '--claim', 'it-requires-the-core', "
        f"'--', '-p', 'slow_start', *{parallel!r}])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "starting what takes long" in line]
    assert lines and lines[0].startswith("0/1  it-requires-the-core on plugin unirl-conformance (")
    assert "starting" not in done.stdout
