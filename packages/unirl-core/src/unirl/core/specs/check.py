"""The check of its settings that a part's `build` begins with."""

from __future__ import annotations

from ..errors import RecipeError
from ..limits import broken_limits
from .part_config import PartConfig

__all__ = ["check_config"]


def check_config(config: PartConfig, *, key: str) -> None:
    """Raise RecipeError, with every reason, for invalid settings. A part's `build` calls it first.

    key: path of the part's settings in a recipe, such as `backend`.
    """
    # Relations between values mean nothing while one of them is out of its limits.
    reasons = list(broken_limits(config, key=key)) or [reason.under(key) for reason in config.problems(None, None)]
    if reasons:
        raise RecipeError(" ".join(map(str, reasons)))
