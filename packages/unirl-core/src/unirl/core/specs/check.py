"""What a part's `build` does first with its settings."""

from __future__ import annotations

from ..errors import RecipeError
from ..limits import broken_limits
from .config import PartConfig

__all__ = ["check_config"]


def check_config(config: PartConfig, *, key: str) -> None:
    """What a part's `build` does first: raises RecipeError, with every reason, for settings that cannot be used.

    key: path of the part's settings in a recipe, such as `backend`.
    """
    # Relations between values mean nothing while one of them is out of its limits.
    reasons = list(broken_limits(config, key=key)) or [reason.under(key) for reason in config.problems(None, None)]
    if reasons:
        raise RecipeError(" ".join(map(str, reasons)))
