"""What can go wrong, and the exit code that each kind of failure gives the command line.

A message says what was asked, what was found and what to do, with the key path first where there is one.
Exit codes: 0 good, 1 a finding (a plan refused, a run that failed), 2 wrong use, 3 a plugin is absent or did not load.
"""

from __future__ import annotations

__all__ = [
    "BatchError",
    "CheckpointError",
    "DataError",
    "EchoMismatch",
    "PlanRejected",
    "PluginBroken",
    "PluginConflict",
    "PluginNotFound",
    "PluginNotInstalled",
    "RecipeError",
    "RewardFailed",
    "RunFailed",
    "UniRLError",
]


class UniRLError(Exception):
    """Something that the user can act on. Shown as one message, without a traceback of ours."""

    exit_code = 1


class RecipeError(UniRLError):
    """A recipe, an override or an option is not what its schema allows."""

    exit_code = 2


class PluginNotFound(UniRLError):
    """A part was named that no installed plugin provides."""

    exit_code = 2


class PluginNotInstalled(PluginNotFound):
    """A part was named that is known, and whose dist is not installed here."""

    exit_code = 3


class PluginBroken(UniRLError):
    """A plugin that was asked for could not be loaded."""

    exit_code = 3


class PluginConflict(PluginBroken):
    """Two installed plugins provide a part of the same kind and name."""


class PlanRejected(UniRLError):
    """`match()` refused the plan; the reasons are in the message."""


class DataError(UniRLError):
    """A prompt file or a row of it cannot be used."""

    exit_code = 2


class BatchError(UniRLError, ValueError):
    """A batch operation was asked for something that its rows cannot give."""


class EchoMismatch(UniRLError):
    """An engine used something else than the request said."""


class RewardFailed(UniRLError):
    """A reward raised, or gave values that cannot be trained on."""


class CheckpointError(UniRLError):
    """A checkpoint is missing, truncated, or belongs to another plan."""


class RunFailed(UniRLError):
    """A run stopped at a step; what was saved before it is intact."""
