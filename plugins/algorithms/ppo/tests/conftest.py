"""Makes the toy importable here, and hands it out."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
from ppo_toy import Bench


@pytest.fixture
def bench() -> Bench:
    return Bench()
