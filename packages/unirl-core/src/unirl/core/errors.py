"""Errors that users can act on, and the exit code of each on the command line.

A message says what it got, what it expected and what to do, with the key path first where there is one.
Exit codes: 0 success, 1 a plan was refused or a run failed, 2 wrong use, 3 a plugin is missing or did not load.
"""

from __future__ import annotations

__all__ = [
    "BatchError",
    "CheckpointError",
    "DataError",
    "DiskFull",
    "EchoMismatch",
    "PlanRejected",
    "PluginBroken",
    "PluginConflict",
    "PluginNotFound",
    "PluginNotInstalled",
    "RecipeError",
    "RewardFailed",
    "RunFailed",
    "RunFolderError",
    "UniRLError",
]


class UniRLError(Exception):
    """Base class of errors that the user can act on. Shown as one message, without our traceback."""

    exit_code = 1


class RecipeError(UniRLError):
    """A recipe, an override or an option does not fit its schema."""

    exit_code = 2


class PluginNotFound(UniRLError):
    """No installed plugin provides the named part."""

    exit_code = 2


class PluginNotInstalled(PluginNotFound):
    """The named part is known, but its dist is not installed."""

    exit_code = 3


class PluginBroken(UniRLError):
    """A plugin that provides a chosen part could not be loaded."""

    exit_code = 3


class PluginConflict(PluginBroken):
    """Two installed plugins provide a part of the same kind and name."""


class PlanRejected(UniRLError):
    """`match()` refused the plan; the reasons are in the message."""


class DataError(UniRLError):
    """A prompt file, or a row of it, is invalid."""

    exit_code = 2


class BatchError(UniRLError, ValueError):
    """A batch operation does not fit the rows or fields of its batch."""


class EchoMismatch(UniRLError):
    """An engine's echo differs from the request: it computed something else."""


class RewardFailed(UniRLError):
    """A reward raised an error, or returned values that cannot be trained on."""


class CheckpointError(UniRLError):
    """A checkpoint is missing, truncated, or belongs to another plan."""


class RunFailed(UniRLError):
    """A run stopped at a step; what was saved before it is intact. phase: of the step, "" where it is not known."""

    def __init__(self, text: str, *, phase: str = "") -> None:
        super().__init__(text)
        self.phase = phase


class ProcessLost(RunFailed):
    """A process that the run needs died or no longer answers. Starting again from the last checkpoint may go further,
    see `run.restarts`."""


class RunFolderError(UniRLError):
    """A run folder cannot be written to or read, or another process holds it."""


class DiskFull(UniRLError):
    """A file did not fit. What was there before is intact."""
