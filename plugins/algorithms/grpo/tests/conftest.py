from __future__ import annotations

import pytest
from token_algorithms.bigrams import Bench


@pytest.fixture
def bench() -> Bench:
    return Bench()
