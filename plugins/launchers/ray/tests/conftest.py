"""Scripts beside these tests are imported by them, too; and Ray."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import ray_clusters


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    """A cluster on this machine, which launchers find running and leave as it is."""
    with ray_clusters.joined():
        yield
