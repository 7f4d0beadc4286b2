"""Scripts beside these tests are imported by them, too; and Ray, started once for the tests of a file."""

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    """A cluster on this machine with fewer CPUs than TransferQueue's own start-up would take."""
    import ray
    from unirl.runtime.ray_worker import SETTINGS

    os.environ.update(SETTINGS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=128 * 2**20,
            runtime_env={"env_vars": {"PYTHONPATH": HERE}},
        )
    try:
        yield
    finally:
        ray.shutdown()
