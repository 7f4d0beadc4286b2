"""What engines that run as programs of their own have in common for a recipe."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from .config import PartConfig
from .model_files import DTYPES

__all__ = ["LOG_LEVELS", "HostedConfig", "hosted_settings", "too_small"]

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


@dataclass
class HostedConfig(PartConfig):
    """Settings of every such engine, in the same words whatever the engine calls them."""

    path: str = ""
    """Folder of the checkpoint; empty is the one that the model which trains was loaded from."""
    dtype: str = "auto"
    """Dtype that the engine holds the weights in and computes in; `auto` is that of the module that trains. Where it is
    named and narrower than the weights that are sent, they are rounded to it."""
    enforce_eager: bool = False
    """Run without CUDA graphs and compilation: starts faster, generates slower. Always so on a CPU."""
    sleep_mode: bool = False
    """Give the memory of the weights back while training runs on the same device."""
    log_level: str = "WARNING"
    """Of the engine's log: `DEBUG`, `INFO`, `WARNING` or `ERROR`."""
    log_file: str = "{run}/logs/{part}-{pid}.log"
    """File that the engine's output is appended to. `{run}` is the run's folder, `{part}` the engine's name, `{pid}`
    the process that it works for. Empty, or with `{run}` and no run, it is kept while the engine is there, for the
    errors that show it."""
    release: str = ""
    """Release of the engine, of those that there are locks for; empty is the newest. `unirl engine-env --release` makes
    its environment."""
    env_dir: str = ""
    """Folder of environments, that of `unirl engine-env --dir`; empty is the usual one."""
    transfer_dir: str = ""
    """Folder that weights pass through; empty is the machine's shared memory, or its temporary folder where they do not
    fit."""
    start_timeout_s: float = 900.0
    """Longest time for the engine to be imported and to load the checkpoint."""
    generate_timeout_s: float = 3600.0
    """Longest time for one rollout."""
    sync_timeout_s: float = 600.0
    """Longest time for taking weights."""
    extra: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Further arguments of the engine, by its own names; those that other keys stand for cannot be given."""


def hosted_settings(config: PartConfig, *, name: str, releases: Collection[str]) -> Iterator[tuple[str, str]]:
    """Why the settings of such an engine cannot be: key path and sentence of each reason; none for any other engine.

    name: of the engine.  releases: that there are locks for besides the newest.
    """
    if not isinstance(config, HostedConfig):
        return
    if config.release not in ("", *releases):
        has = (
            f"the newest, without a name, and {', '.join(releases)}" if releases else "the newest alone, without a name"
        )
        yield "engine.release", f"{config.release!r} was asked for; engine {name!r} has {has}."
    for key, value, allowed in (
        ("dtype", config.dtype, ("auto", *DTYPES)),
        ("log_level", config.log_level, LOG_LEVELS),
    ):
        if value not in allowed:
            yield f"engine.{key}", f"{value!r} was asked for; it is one of {', '.join(allowed)}."
    for key in ("start_timeout_s", "generate_timeout_s", "sync_timeout_s"):
        seconds = getattr(config, key)
        if not seconds > 0:
            yield f"engine.{key}", f"{seconds} was asked for; it must be above 0."


def too_small(config: HostedConfig, **least: float) -> Iterator[str]:
    """Why settings cannot be: those that are less than the least value here."""
    for key, bound in least.items():
        if (value := getattr(config, key)) < bound:
            yield f"engine.{key}: {value} was asked for; it must be {bound} or more."
