"""Settings of the Weights & Biases tracker."""

from __future__ import annotations

from dataclasses import dataclass, field

from unirl.core.limits import limit, one_of
from unirl.core.specs.part_config import PartConfig

__all__ = ["WandbConfig"]


@dataclass
class WandbConfig(PartConfig):
    """Settings left empty are W&B's own: its environment variables, then its settings files, then a default."""

    mode: str | None = one_of("online", "offline", "disabled", default=None)
    """`online` uploads during the run, `offline` writes files to upload later, `disabled` does nothing. Empty takes
    `WANDB_MODE`, or what `wandb offline` set, else `online`."""
    project: str = ""
    """W&B project of the run; created if it does not exist. Empty takes `WANDB_PROJECT`, else `unirl`."""
    entity: str = ""
    """W&B user or team; empty takes `WANDB_ENTITY`, else the account's default."""
    tags: list[str] = field(default_factory=lambda: list[str]())
    """Tags of the run; empty takes `WANDB_TAGS`."""
    name: str = ""
    """Display name of the run; empty takes `WANDB_NAME`, else `run.name`."""
    run_id: str = ""
    """W&B run id; empty takes `WANDB_RUN_ID`, else a new one. It is stored in the run folder, so a resumed run does not
    need it."""
    max_images: int = limit(16, least=1, hint="run.media_every=0 sends no training samples at all.")
    """Maximum number of images sent per key and step."""
    max_texts: int = limit(16, least=1, hint="run.media_every=0 sends no training samples at all.")
    """Maximum number of completions sent per key and step, in full."""
    init_timeout_s: float | None = limit(None, above=0)
    """Maximum wait for the server at the start of a run, in seconds. Empty takes `WANDB_INIT_TIMEOUT`, else 90."""
