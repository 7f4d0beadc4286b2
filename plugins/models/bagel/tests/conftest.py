"""Makes the modules beside the tests importable."""

from __future__ import annotations

import sys
from pathlib import Path

from miniatures import folder_of, media_of, model_of
from unirl.models.bagel import tiny
from unirl.models.bagel.config import BagelConfig
from unirl.models.bagel.model import build

sys.path.insert(0, str(Path(__file__).parent))

tiny_folder = folder_of("bagel", tiny.write)
model = model_of(build, BagelConfig)
media = media_of(tiny.media)
