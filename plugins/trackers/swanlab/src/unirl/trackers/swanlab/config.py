"""Settings of the SwanLab tracker."""

from __future__ import annotations

from dataclasses import dataclass, field

from unirl.core.limits import limit, one_of
from unirl.core.specs.part_config import PartConfig

__all__ = ["SwanlabConfig"]


@dataclass
class SwanlabConfig(PartConfig):
    """Settings left empty are SwanLab's own: its settings files and environment variables, then a default."""

    mode: str | None = one_of("online", "offline", "disabled", default=None)
    """`online` uploads during the run, `offline` writes files to upload later, `disabled` does nothing. Empty takes
    `SWANLAB_MODE`, else `online`."""
    project: str = ""
    """SwanLab project of the run; created if it does not exist. Empty takes `SWANLAB_PROJ_NAME`, else `unirl`."""
    workspace: str = ""
    """SwanLab user or organization; empty takes `SWANLAB_WORKSPACE`, else the account's own."""
    name: str = ""
    """Display name of the run; empty takes `SWANLAB_EXP_NAME`, else `run.name`."""
    tags: list[str] = field(default_factory=lambda: list[str]())
    """Tags of the run; empty takes `SWANLAB_TAGS`."""
    notes: str = ""
    """Description of the run; empty takes `SWANLAB_DESCRIPTION`."""
    run_id: str = ""
    """SwanLab run id; empty takes `SWANLAB_RUN_ID`, else a new one. It is stored in the run folder, so a resumed run
    does not need it."""
    max_images: int = limit(16, least=1, hint="run.media_every=0 sends no training samples at all.")
    """Maximum number of images or videos logged per key and step."""
    max_texts: int = limit(16, least=1, hint="run.media_every=0 sends no training samples at all.")
    """Maximum number of completions logged per key and step, in full."""
    init_timeout_s: float = limit(90.0, above=0)
    """Maximum wait for SwanLab at the start of a run, in seconds."""
