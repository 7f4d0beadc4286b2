"""A thought, its recaption and its image, both stages from one process of vLLM-Omni."""

from __future__ import annotations

import pytest
from external_engines.both_stages import *
from external_engines.both_stages import BothStages
from hunyuan_runs import SMALL, run

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.fixture(scope="module")
def recipe() -> BothStages:
    """`hunyuan-image3/think-recaption`, from source images of different sizes."""
    return BothStages("think", tuple(SMALL), run)
