"""Makes the modules beside the tests importable."""

from __future__ import annotations

import sys
from pathlib import Path

from miniatures import folder_of, media_of, model_of
from unirl.models.hunyuan_image3 import tiny
from unirl.models.hunyuan_image3.config import HunyuanImageConfig
from unirl.models.hunyuan_image3.model import build

sys.path.insert(0, str(Path(__file__).parent))

tiny_folder = folder_of("hunyuan-image3", tiny.write)
model = model_of(build, HunyuanImageConfig)
media = media_of(tiny.media)
