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

__all__ = ["run_suite"]

_SUITE = "unirl.conformance.suite"
_QUIET = ("-q", "--no-header", "--no-summary", "--tb=no", "-p", "no:cacheprovider", "-p", "no:logging")
"""The report is ours; of pytest only the line of progress is shown. No claim reads captured logs; capturing them would
take a millisecond of each, and there are thousands."""
_PLUGINS = ("--disable-plugin-autoload", "-p", "timeout", *(("-p", "xdist") if find_spec("xdist") else ()))
"""Pytest plugins that happen to be installed here are no part of the claims: some take seconds to load, and some change
how tests run. Others can be asked for with `-p`."""


def run_suite(
    selection: Selection | None = None, *, tier: Tier = "tiny", catalog: str = "", pytest_args: Sequence[str] = ()
) -> Report:
    """Try every claim that is selected and give what was found.

    catalog: `"module:function"` that gives the catalog; empty takes what is installed.  pytest_args: plain flags of
    pytest.  Raises RecipeError when pytest does not take those, RunFailed when it could not do its work otherwise, with
    its exit code, and KeyboardInterrupt when someone stopped it.
    """
    selection = selection or Selection()
    ini = Path(__file__).parent / "suite" / "pytest.ini"
    # Own settings and root: those of the project that conformance is started in are about its own tests.
    args = ["-c", str(ini), "--rootdir", str(ini.parent), *_QUIET, *_PLUGINS, f"--unirl-tier={tier}"]
    args += [f"--unirl-{kind}={name}" for kind, names in selection.names.items() for name in names]
    args += [f"--unirl-plugin={dist}" for dist in selection.plugins]
    args += [f"--unirl-kind={kind}" for kind in selection.kinds]
    args += [f"--unirl-claim={name}" for name in selection.claims]
    if catalog:
        args.append(f"--unirl-catalog={catalog}")
    # Claims about plugins are all that is static, and their modules import nothing heavy.
    light = tier == "static" or selection.kinds == ("plugin",)
    modules = [f"{_SUITE}.{name}" for name in suite_modules(["plugin"])] if light else [_SUITE]
    holder = _Holder()
    began = time.perf_counter()
    code = pytest.main(
        ["-p", "unirl.conformance.pytest_plugin", *args, "--pyargs", *modules, *pytest_args], plugins=[holder]
    )
    seconds = time.perf_counter() - began
    if holder.stopped:
        raise KeyboardInterrupt
    if code == pytest.ExitCode.USAGE_ERROR:
        raise RecipeError("conformance: pytest cannot do what it was asked for; what it printed says why.")
    if holder.config is None or code not in (
        pytest.ExitCode.OK,
        pytest.ExitCode.TESTS_FAILED,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    ):
        raise RunFailed(f"conformance: pytest stopped with exit code {int(code)}; what it printed says why.")
    return holder.config.stash[COLLECTOR].report(
        created=datetime.now(UTC).isoformat(timespec="seconds"), seconds=seconds
    )


class _Holder:
    """Keeps the config of the run, which holds the collector."""

    config: pytest.Config | None = None
    stopped = False

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        # pytest also ends a collection that failed with an exception of this family.
        self.stopped = excinfo.type is KeyboardInterrupt

    def pytest_configure(self, config: pytest.Config) -> None:
        self.config = config
