"""Scripts beside these tests are imported by them, too; and Ray, started once for the tests of a file."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray_clusters

HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    """A cluster on this machine with fewer CPUs than TransferQueue's own start-up would take."""
    with ray_clusters.own(num_cpus=2, PYTHONPATH=HERE):
        yield
