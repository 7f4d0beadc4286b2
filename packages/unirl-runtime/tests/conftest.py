"""Scripts beside these tests are imported by them, too; and Ray, started once for the tests of a file."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import small_runs
import warm_workers


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with warm_workers.serving(tmp_path_factory.mktemp("warm")) as stub:
        yield stub


@pytest.fixture(scope="module")
def ray_here(warm_python: str) -> Iterator[None]:
    """A cluster on this machine, which launchers find running and leave as it is."""
    with small_runs.ray_cluster(warm_python):
        yield
