"""Settings of the Trackio tracker."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.core.limits import limit
from unirl.core.specs.part_config import PartConfig

__all__ = ["TrackioConfig"]


@dataclass
class TrackioConfig(PartConfig):
    """Settings left empty are Trackio's own environment variables, then a default."""

    project: str = "unirl"
    """Trackio project of the run; created if it does not exist."""
    name: str = ""
    """Name of the run; empty takes `run.name`."""
    group: str = ""
    """Group of the run on the page."""
    server_url: str = ""
    """Server to log to; its token is `TRACKIO_WRITE_TOKEN`. Empty takes `TRACKIO_SERVER_URL`, else none: files in
    `TRACKIO_DIR`, else in the run folder."""
    space_id: str = ""
    """Hugging Face Space to log to, created if it does not exist. Empty takes `TRACKIO_SPACE_ID`, else none."""
    max_images: int = limit(16, least=1, hint="run.media_every=0 sends no training samples at all.")
    """Maximum number of images or videos logged per key and step."""
    max_texts: int = limit(16, least=1, hint="run.media_every=0 sends no training samples at all.")
    """Maximum number of completions logged per key and step, in full."""
    init_timeout_s: float = limit(90.0, above=0)
    """Maximum wait for Trackio at the start of a run, in seconds."""
