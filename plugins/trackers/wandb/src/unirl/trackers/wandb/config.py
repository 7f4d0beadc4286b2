"""Settings of the Weights & Biases tracker."""

from __future__ import annotations

from dataclasses import dataclass, field

from unirl.core.config import PartConfig

__all__ = ["MODES", "WandbConfig"]

MODES = ("online", "offline", "disabled")


@dataclass
class WandbConfig(PartConfig):
    mode: str = "online"
    """`online` uploads while it runs, `offline` writes files to upload later, `disabled` does nothing."""
    project: str = "unirl"
    """W&B project that the run is shown in; it is made when there is none."""
    entity: str = ""
    """User or team; empty takes the default of the account."""
    tags: list[str] = field(default_factory=lambda: list[str]())
    """Tags of the run."""
    name: str = ""
    """Shown name of the run; empty takes `run.name`."""
    run_id: str = ""
    """Id of the W&B run; empty makes one. It is kept in the run folder, so a resumed run needs no id."""
    max_images: int = 16
    """Images sent at once under one key; further ones are left out."""
    max_texts: int = 16
    """Texts sent at once under one key, whole; further ones are left out."""
    init_timeout_s: float = 90.0
    """Longest wait for the server at the start of a run, in seconds."""
