"""Running the suite from Python: one call, one report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import pytest
from unirl.core.errors import RecipeError, RunFailed

from .claims import Tier, suite_modules
from .pytest_plugin import COLLECTOR
from .results import Report
from .subjects import Selection

__all__ = ["Stopped", "run_suite"]

_SUITE = "unirl.conformance.suite"
_QUIET = ("--no-header", "--no-summary", "--tb=no", "-p", "no:cacheprovider", "-p", "no:logging")
"""pytest shows the progress; the report explains the results. No claim reads captured logs, and capturing them would
take a millisecond of each, of thousands."""
_PLUGINS = ("--disable-plugin-autoload", "-p", "timeout", *(("-p", "xdist") if find_spec("xdist") else ()))
"""Pytest plugins that happen to be installed are not part of the claims: some take seconds to load, and some change
how tests run. Others can be enabled with `-p`."""


class Stopped(KeyboardInterrupt):
    """The user stopped a run with Ctrl-C."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self.report = report
        """The results so far; claims that were not reached are listed as not run."""


def run_suite(
    selection: Selection | None = None,
    *,
    tier: Tier = "tiny",
    catalog: str = "",
    batch_invariant: bool = False,
    pytest_args: Sequence[str] = (),
) -> Report:
    """Run every selected claim and return the report.

    catalog: `"module:function"` that gives the catalog; empty takes what is installed.  batch_invariant: compute in
    that mode, whose variables are to be set before torch is loaded, see `unirl.numerics.batch_invariant`.
    pytest_args: flags of pytest, such as `-v` for a line with each claim and the share that is done.

    Raises RecipeError when pytest does not take its flags, RunFailed when it could not do its work otherwise, with its
    exit code, and Stopped on Ctrl-C, or a plain KeyboardInterrupt if pytest had not started.
    """
    selection = selection or Selection()
    ini = Path(__file__).parent / "suite" / "pytest.ini"
    # Own settings and root, and no conftest.py: what the current folder has of these is about its own tests.
    args = ["-c", str(ini), "--rootdir", str(ini.parent), "--noconftest", *_QUIET, *_PLUGINS, f"--unirl-tier={tier}"]
    args += selection.options("--unirl-")
    if catalog:
        args.append(f"--unirl-catalog={catalog}")
    if batch_invariant:
        args.append("--unirl-batch-invariant")
    # Claims about plugins are all that is static, and their modules import nothing heavy.
    light = tier == "static" or selection.kinds == ("plugin",)
    modules = [f"{_SUITE}.{name}" for name in suite_modules(["plugin"])] if light else [_SUITE]
    holder = _Holder()
    began = time.perf_counter()
    code = pytest.main(
        ["-p", "unirl.conformance.pytest_plugin", *args, "--pyargs", *modules, *pytest_args],
        plugins=[holder],
    )
    seconds = time.perf_counter() - began
    created = datetime.now(UTC).isoformat(timespec="seconds")
    if holder.stopped:
        if holder.config is None or COLLECTOR not in holder.config.stash:
            raise KeyboardInterrupt
        raise Stopped(holder.config.stash[COLLECTOR].report(created=created, seconds=seconds, is_stopped=True))
    if code == pytest.ExitCode.USAGE_ERROR:
        raise RecipeError("conformance: pytest rejected its arguments; see its output above.")
    if holder.config is None or code not in (
        pytest.ExitCode.OK,
        pytest.ExitCode.TESTS_FAILED,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    ):
        raise RunFailed(f"conformance: pytest stopped with exit code {int(code)}; see its output above.")
    return holder.config.stash[COLLECTOR].report(created=created, seconds=seconds)


class _Holder:
    """Keeps the config of the run, which holds the collector."""

    config: pytest.Config | None = None
    stopped = False

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        # pytest also ends a collection that failed with an exception of this family.
        self.stopped = excinfo.type is KeyboardInterrupt

    def pytest_configure(self, config: pytest.Config) -> None:
        self.config = config
        # With `-v`, claims are named by their module alone, wherever the suite is installed.
        config.cwd_relative_nodeid = lambda nodeid: nodeid
