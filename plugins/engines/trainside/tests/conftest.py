from __future__ import annotations

import pytest
from unirl.models.sd3 import tiny
from unirl.models.sd3.config import Sd3Config
from unirl.models.sd3.model import Sd3Model, build


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Sd3Model:
    """A real model: the random miniature of sd3."""
    folder = tmp_path_factory.mktemp("sd3") / "tiny"
    tiny.write(folder, seed=0)
    return build(Sd3Config(path=str(folder)), device="cpu")
