"""What all tests of the workspace share."""

from __future__ import annotations

from typing import Any

import pytest

MUTANTS = "packages/unirl-conformance/tests/test_mutants.py"
"""Its tests share one report of each kind of part, and nothing between the kinds."""
LONG = (
    "packages/unirl-runtime/tests/test_launchers.py",
    "tests/test_third_party.py",
    "packages/unirl-runtime/tests/test_faults.py",
    f"{MUTANTS}[algorithm",
    f"{MUTANTS}[backend",
    "packages/unirl-conformance/tests/test_meta.py",
    "tests/test_asynchrony.py",
    "plugins/transports/transfer-queue/tests/test_transfer_queue_run.py",
    "packages/unirl-conformance/tests/test_new_installed.py",
    "packages/unirl-runtime/tests/test_cluster.py",
    f"{MUTANTS}[engine",
)
"""What takes half a minute or more, the longest first: it starts first, so that several workers end together."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are reported as not run where there is no CUDA device; they never pass there."""
    if hasattr(config, "workerinput"):
        places = {name: place for place, name in enumerate(LONG)}
        scopes = [scope(item.nodeid) for item in items]
        # After the long ones those with many tests, as xdist has it.
        counts = {name: scopes.count(name) for name in set(scopes)}
        items.sort(key=lambda item: (places.get(scope(item.nodeid), len(LONG)), -counts[scope(item.nodeid)]))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="not run: needs a CUDA device"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """`--dist loadfile` in the order that the workers collect, and the mutants by their kind."""
    option: Any = config.option
    if option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class LongestFirst(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid)

    option.loadscopereorder = False
    return LongestFirst(config, log)


def scope(nodeid: str) -> str:
    """What one worker has to run together: the file of a test, of mutants those of their kind."""
    file, _, name = nodeid.partition("::")
    kind = name.partition("[")[2].rstrip("]").partition("-")[0]
    return f"{file}[{kind}" if file == MUTANTS and kind else file
